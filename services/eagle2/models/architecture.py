"""What a checkpoint's ``config.json`` says about a network, with the defaults of its family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle2.errors import ModelError
from eagle2.models.rope import RopeConfig, read_rope

__all__ = ["DraftConfig", "RopeConfig", "TargetConfig", "read_json"]

Json = Mapping[str, Any]

# Values that transformers assumes for a key that config.json does not have; published files rely on them.
_LLAMA: Json = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL: Json = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN: Json = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
_FAMILIES: Mapping[str, Json] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128},
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The shape of a target. ``sliding_window`` (tokens) is kept, not applied: the context must be capped to it.

    ``qkv_bias``, ``o_bias`` and ``mlp_bias`` say which projections carry a bias; ``qk_norm`` is Qwen3's RMS norm of
    each query and key head.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> TargetConfig:
        """Read ``config.json`` and ``generation_config.json``. Raises ``ModelError`` for what is not supported."""
        config = read_json(folder / "config.json")
        architecture = _architecture(config, folder)
        values = {**_FAMILIES[architecture], **config}
        _refuse_unsupported(values, folder)
        qwen2 = architecture == "Qwen2ForCausalLM"
        attention_bias = bool(values.get("attention_bias")) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        beside = folder / "generation_config.json"
        generation = read_json(beside) if beside.is_file() else {}
        bos = generation.get("bos_token_id", values["bos_token_id"])
        return cls(
            architecture=architecture,
            **_sizes(values, folder),
            num_layers=_positive(values, "num_hidden_layers", folder),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope=read_rope(values, folder),
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(values.get("mlp_bias")) and architecture == "LlamaForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            sliding_window=_sliding_window(values, architecture),
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=_eos(generation, values, folder),
        )


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The shape of an EAGLE-1/2 head: one Llama layer behind ``fc``. A missing key ``bias`` means ``fc_bias``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    fc_bias: bool
    qkv_bias: bool

    @classmethod
    def from_folder(cls, folder: Path) -> DraftConfig:
        """Read a head's ``config.json`` (Llama keys plus ``bias``). Raises ``ModelError`` for what is not supported."""
        values = {**_LLAMA, "num_hidden_layers": 1, **read_json(folder / "config.json")}
        _refuse_unsupported(values, folder)
        if values["num_hidden_layers"] != 1:
            raise ModelError(f"{folder}: a draft head has 1 layer, its config says {values['num_hidden_layers']}.")
        return cls(
            **_sizes(values, folder),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope=read_rope(values, folder),
            fc_bias=bool(values.get("bias", True)),
            qkv_bias=bool(values.get("qkv_bias", False)),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``. Raises ``ModelError`` where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is not a checkpoint: it has no {path.name}.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__} where an object is expected.")
    return value


def _architecture(config: Json, folder: Path) -> str:
    named = config.get("architectures") or [_MODEL_TYPES.get(str(config.get("model_type")))]
    name = named[0] if isinstance(named, list) and named[0] else config.get("model_type")
    if name not in _FAMILIES:
        raise ModelError(f"{folder}: the architecture {name!r} is not supported; supported are {', '.join(_FAMILIES)}.")
    return str(name)


def _refuse_unsupported(values: Json, folder: Path) -> None:
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{folder}: the activation {activation!r} is not supported; supported is 'silu'.")
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{folder}: weights quantized with {method!r} are not supported; supported are float32, float16, bfloat16 "
            "and GGUF files."
        )


def _positive(values: Json, key: str, folder: Path) -> int:
    value = values.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{folder}: {key} must be a positive whole number, its config says {value!r}.")
    return value


def _sizes(values: Json, folder: Path) -> dict[str, int]:
    """The six sizes that a target and a head share, checked to fit each other."""
    hidden, heads = _positive(values, "hidden_size", folder), _positive(values, "num_attention_heads", folder)
    kv_heads = heads if values.get("num_key_value_heads") is None else _positive(values, "num_key_value_heads", folder)
    if heads % kv_heads:
        raise ModelError(f"{folder}: {heads} attention heads cannot share {kv_heads} key/value heads evenly.")
    head_dim = hidden // heads if values.get("head_dim") is None else _positive(values, "head_dim", folder)
    if head_dim % 2:
        raise ModelError(f"{folder}: rotary positions need an even head size, its config says {head_dim}.")
    return {
        "vocab_size": _positive(values, "vocab_size", folder),
        "hidden_size": hidden,
        "intermediate_size": _positive(values, "intermediate_size", folder),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _positive(values, "max_position_embeddings", folder),
    }


def _sliding_window(values: Json, architecture: str) -> int | None:
    window = values.get("sliding_window")
    if architecture == "LlamaForCausalLM" or not isinstance(window, int):
        return None
    if architecture == "MistralForCausalLM":
        return window
    if not values.get("use_sliding_window", False):
        return None
    kinds = values.get("layer_types")
    slides = (
        "sliding_attention" in kinds if kinds else values.get("max_window_layers", 28) < values["num_hidden_layers"]
    )
    return window if slides else None


def _eos(generation: Json, values: Json, folder: Path) -> tuple[int, ...]:
    found = generation.get("eos_token_id")
    if found is None:
        found = values["eos_token_id"]
    ids = () if found is None else tuple(found) if isinstance(found, list) else (found,)
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"{folder}: eos_token_id must be a token id or a list of them, its config says {found!r}.")
    return ids
