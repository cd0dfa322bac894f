"""The weights of a checkpoint, and whether a draft head fits a target."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eagle2.errors import ModelError
from eagle2.models.architecture import DraftConfig, RopeConfig, TargetConfig, read_json

__all__ = ["DraftConfig", "RopeConfig", "TargetConfig", "check_head", "load_tensors", "real_vocab_size"]

# One file is preferred to shards, safetensors to pickles, as transformers does.
_LAYOUTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

# Relative distance above which two embedding rows are different tokens. Rounding to bfloat16 moves a row by 0.4 %,
# four-bit quantization by about 7 %; rows of two different tokens lie 50 % to 140 % apart.
_ROW_TOLERANCE = 0.125
_ROWS_AT_ONCE = 4096


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint folder by name, on the CPU, in the dtype that they are stored in.

    Reads ``model.safetensors`` or ``pytorch_model.bin``, whole or sharded. Raises ``ModelError`` where there is
    none, where a shard is missing and where a file is cut off.
    """
    layout = next((name for name in _LAYOUTS if (folder / name).is_file()), None)
    if layout is None:
        raise ModelError(f"{folder} has no weights: none of {', '.join(_LAYOUTS)} is there.")
    if not layout.endswith(".index.json"):
        return _load_file(folder / layout)
    weight_map: dict[str, str] = read_json(folder / layout).get("weight_map", {})
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise ModelError(f"{folder} is incomplete: {layout} names the shard {shard}, which is not there.")
        tensors |= _load_file(folder / shard)
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise ModelError(f"{folder} is incomplete: {layout} names the tensor {absent[0]}, which no shard holds.")
    return tensors


def _load_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{path} cannot be read, it may be cut off: {reason}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise ModelError(f"{path} holds a {type(loaded).__name__} that is not a plain mapping of names to tensors.")
    return loaded


def real_vocab_size(config: TargetConfig, tokenizer_size: int) -> int:
    """How many ids both the tokenizer and the lm_head know; ids from there on are padding, never to be emitted."""
    return min(config.vocab_size, tokenizer_size)


def check_head(
    draft: DraftConfig,
    tensors: Mapping[str, torch.Tensor],
    target: TargetConfig,
    target_embedding: torch.Tensor | None = None,
) -> None:
    """Raise ``ModelError`` where a draft head cannot serve a target.

    tensors:          the head's, as ``load_tensors`` gives them.
    target_embedding: (V, H), any dtype; compared with the head's own copy if it has one.
    """
    _refuse_eagle3(draft, tensors)
    if draft.vocab_size != target.vocab_size:
        raise ModelError(
            f"The draft head's vocabulary has {draft.vocab_size} tokens, the target's has {target.vocab_size}; they "
            "must be the same."
        )
    if draft.hidden_size != target.hidden_size:
        raise ModelError(
            f"The draft head's hidden size is {draft.hidden_size}, the target's is {target.hidden_size}; they must be "
            "the same."
        )
    _check_biases(draft, tensors)
    expected = _expected_shapes(draft)
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelError(f"The draft head has no tensor {name}; its config asks for one of shape {shape}.")
        if tuple(tensors[name].shape) != shape:
            raise ModelError(
                f"The draft head's {name} has shape {tuple(tensors[name].shape)}, its config asks for {shape}."
            )
    # Old checkpoints store the rotary frequencies, which the config determines anyway.
    known = {*expected, "embed_tokens.weight"}
    unknown = [name for name in sorted(tensors) if name not in known and not name.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise ModelError(f"The draft head has the tensor {unknown[0]}, which an EAGLE-1/2 head does not have.")
    own = tensors.get("embed_tokens.weight")
    if own is not None and target_embedding is not None:
        _compare_embeddings(own, target_embedding)


def _refuse_eagle3(draft: DraftConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    marks = [
        name for name in sorted(tensors) if name.startswith("midlayer.") or name in ("d2t", "t2d", "lm_head.weight")
    ]
    found = f"the tensor {marks[0]}" if marks else None
    fc = tensors.get("fc.weight")
    if found is None and fc is not None and tuple(fc.shape) == (draft.hidden_size, 3 * draft.hidden_size):
        found = f"fc.weight of shape {tuple(fc.shape)}"
    if found is not None:
        H = draft.hidden_size
        raise ModelError(
            f"The draft head is an EAGLE-3 checkpoint (it has {found}); supported are EAGLE-1 and EAGLE-2 heads, whose "
            f"layer is layers.0 and whose fc.weight has shape {(H, 2 * H)}."
        )


def _check_biases(draft: DraftConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    has = "fc.bias" in tensors
    if has != draft.fc_bias:
        raise ModelError(
            f"The draft head's config says bias {str(draft.fc_bias).lower()} (a missing key means true), but its "
            f"checkpoint has {'a' if has else 'no'} tensor fc.bias."
        )
    for name in ("q_proj", "k_proj", "v_proj"):
        tensor = f"layers.0.self_attn.{name}.bias"
        if (tensor in tensors) != draft.qkv_bias:
            raise ModelError(
                f"The draft head's config says qkv_bias {str(draft.qkv_bias).lower()} (a missing key means false), but "
                f"its checkpoint has {'a' if tensor in tensors else 'no'} tensor {tensor}."
            )


def _expected_shapes(draft: DraftConfig) -> dict[str, tuple[int, ...]]:
    H, inter = draft.hidden_size, draft.intermediate_size
    q, kv = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    layer = "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 2 * H),
        f"{layer}self_attn.q_proj.weight": (q, H),
        f"{layer}self_attn.k_proj.weight": (kv, H),
        f"{layer}self_attn.v_proj.weight": (kv, H),
        f"{layer}self_attn.o_proj.weight": (H, q),
        f"{layer}mlp.gate_proj.weight": (inter, H),
        f"{layer}mlp.up_proj.weight": (inter, H),
        f"{layer}mlp.down_proj.weight": (H, inter),
        f"{layer}post_attention_layernorm.weight": (H,),
    }
    if draft.fc_bias:
        shapes["fc.bias"] = (H,)
    if draft.qkv_bias:
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{layer}self_attn.{name}.bias"] = (rows,)
    return shapes


def _compare_embeddings(own: torch.Tensor, target: torch.Tensor) -> None:
    """Both (V, H). A head that was trained with its tokens in another order drafts nonsense, silently."""
    if own.shape != target.shape:
        raise ModelError(
            f"The draft head's embed_tokens.weight has shape {tuple(own.shape)}, the target's {tuple(target.shape)}."
        )
    for start in range(0, len(own), _ROWS_AT_ONCE):
        a = own[start : start + _ROWS_AT_ONCE].float()
        b = target[start : start + _ROWS_AT_ONCE].to(device=a.device, dtype=torch.float32)
        distance, size = (a - b).norm(dim=1), torch.maximum(a.norm(dim=1), b.norm(dim=1))
        # Written so that NaN counts as different.
        different = (~(distance <= _ROW_TOLERANCE * size)).nonzero()
        if len(different):
            row = int(different[0])
            raise ModelError(
                f"Token id {start + row} has another embedding in the draft head than in the target (norms "
                f"{a[row].norm():.4g} and {b[row].norm():.4g}, distance {distance[row]:.4g}); the vocabularies must "
                "have the same tokens in the same order."
            )
