"""A GGUF file, turned into a checkpoint folder in the Hugging Face layout."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file

from eagle2.errors import ModelError
from eagle2.models.gguf_tokenizer import build_tokenizer, end_token_ids, tokenizer_config

FORMAT_VERSION = 1  # raised when the output changes, so that folders of an older version are not used
_SHARD_BYTES = 4 << 30
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# llama.cpp rotates neighbouring pairs for these, so its converter reordered the rows of q and k.
_PERMUTED = ("llama", "mistral")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama 3.1's frequency scaling is stored as a tensor of divisors; these are the constants that produce it.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def convert(path: Path, folder: Path) -> None:
    """Write ``config.json``, bfloat16 safetensors, tokenizer and chat template of a GGUF file into ``folder``.

    Raises ``ModelError`` for an architecture, a tensor type or a tokenizer that is not supported.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} cannot be read as GGUF, it may be cut off: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    parts = metadata.get("split.count", 1)
    if parts > 1:
        raise ModelError(f"{path} is one of {parts} parts of a split GGUF file; supported is a single file.")
    names = {tensor.name for tensor in reader.tensors}
    config = _config(path, metadata, reader.tensors, names)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": end_token_ids(metadata)}
    _write_json(folder / "generation_config.json", generation)
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    _write_tensors(path, reader.tensors, config, metadata["general.architecture"], folder)


def _config(path: Path, metadata: Mapping[str, Any], tensors: list[Any], names: set[str]) -> dict[str, Any]:
    kind = metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise ModelError(
            f"{path}: the GGUF architecture {kind!r} is not supported; supported are {', '.join(_ARCHITECTURES)}."
        )
    if metadata.get(f"{kind}.expert_count", 0):
        raise ModelError(
            f"{path}: {metadata[f'{kind}.expert_count']} experts are not supported; supported are dense models."
        )

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{kind}.{key}", default)
        if found is None:
            raise ModelError(f"{path}: the GGUF metadata has no {kind}.{key}.")
        return found

    heads, hidden = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length", hidden // heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"{path}: rotary positions on {value('rope.dimension_count')} of {head_dim} dimensions are not supported; "
            "supported is all of them."
        )
    window = metadata.get(f"{kind}.attention.sliding_window")
    name = "MistralForCausalLM" if kind == "llama" and window else _ARCHITECTURES[kind]
    return {
        "architectures": [name],
        "model_type": name.removesuffix("ForCausalLM").lower(),
        "vocab_size": next(int(t.shape[-1]) for t in tensors if t.name == "token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        # Stored as float32; shortest decimal that gives the same float32, e.g. 1e-05.
        "rms_norm_eps": float(str(np.float32(value("attention.layer_norm_rms_epsilon")))),
        "hidden_act": "silu",
        "rope_theta": float(value("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(path, kind, metadata, tensors, head_dim),
        "attention_bias": _attention_bias(path, kind, names),
        "mlp_bias": False,
        "sliding_window": window,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16",
    }


def _attention_bias(path: Path, kind: str, names: set[str]) -> bool:
    if kind == "qwen2":  # always has q, k and v biases, and no key for them
        return False
    found = [part for part in ("attn_q", "attn_k", "attn_v", "attn_output") if f"blk.0.{part}.bias" in names]
    if found and len(found) < 4:
        raise ModelError(f"{path}: attention biases on {', '.join(found)} only are not supported for {kind!r}.")
    return bool(found)


def _rope_scaling(
    path: Path, kind: str, metadata: Mapping[str, Any], tensors: list[Any], head_dim: int
) -> dict[str, Any] | None:
    divisors = next((t for t in tensors if t.name == "rope_freqs.weight"), None)
    if divisors is not None:
        theta = float(metadata.get(f"{kind}.rope.freq_base", 10000.0))
        return _llama3_scaling(path, np.asarray(divisors.data, dtype=np.float64).ravel(), theta, head_dim)
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "none":
        return None
    if scaling == "linear":
        return {"rope_type": "linear", "factor": float(metadata[f"{kind}.rope.scaling.factor"])}
    raise ModelError(f"{path}: rope scaling {scaling!r} is not supported; supported are 'none', 'linear' and llama3.")


def _llama3_scaling(path: Path, divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Recognise the frequency divisors (head_dim / 2,) of Llama 3.1 and later by recomputing them."""
    factor = round(float(divisors.max()), 4)
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    turns = _LLAMA3_ROPE["original_max_position_embeddings"] * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((turns / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(
            f"{path}: the frequency divisors in rope_freqs.weight (largest {factor}) are not those of llama3 scaling, "
            "the only kind that is supported."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _write_tensors(path: Path, tensors: list[Any], config: Mapping[str, Any], kind: str, folder: Path) -> None:
    wanted = [t for t in tensors if t.name != "rope_freqs.weight"]
    groups = list(_shards(wanted))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        whole = len(groups) == 1
        file = "model.safetensors" if whole else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shard = {_hf_name(path, t.name): _tensor(path, t, config, kind) for t in group}
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors makes it private, but a cache folder may be shared
        weight_map |= dict.fromkeys(shard, file)
    if len(groups) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _shards(tensors: list[Any]) -> Iterator[list[Any]]:
    """Groups of at most ``_SHARD_BYTES`` in bfloat16, so that a large file never lies in memory twice."""
    group: list[Any] = []
    size = 0
    for tensor in tensors:
        more = 2 * int(tensor.n_elements)
        if group and size + more > _SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += more
    yield group


def _hf_name(path: Path, name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    raise ModelError(f"{path}: the tensor {name} belongs to no supported architecture.")


def _tensor(path: Path, tensor: Any, config: Mapping[str, Any], kind: str) -> torch.Tensor:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ModelError(
            f"{path}: {tensor.name} is quantized as {tensor.tensor_type.name}, which is not supported."
        ) from None
    if kind in _PERMUTED and re.search(r"\.attn_[qk]\.", tensor.name):
        key = "num_attention_heads" if ".attn_q." in tensor.name else "num_key_value_heads"
        values = _unpermute(values, config[key])
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Bring rows from interleaved rotary pairs (0, d/2, 1, d/2+1, ...) back to halves (0, 1, ..., d/2, ...)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
