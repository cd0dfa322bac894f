"""What training writes: the state that a killed run resumes from, and the finished head in the published format."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from eagle2.errors import ConfigError
from eagle2.models.architecture import DraftConfig, TargetConfig
from eagle2.models.draft_vocabulary import DraftVocabulary

STATE = "training_state.pt"


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Replace ``path`` by ``data``: after a kill there is the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the training state (tensors, numbers and texts) to ``folder``, atomically."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_atomically(folder / STATE, buffer.getbuffer())


def load_state(folder: Path) -> dict[str, Any] | None:
    """The training state in ``folder``, or None. Raises ``ConfigError`` where it cannot be read."""
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the pickle inside does
        raise ConfigError(f"{path} cannot be read ({error}); remove it to begin again.") from error
    return state


def head_config(
    target: TargetConfig, *, bias: bool, max_length: int, intermediate_size: int | None = None
) -> dict[str, Any]:
    """``config.json`` of a head for ``target``: Llama keys and ``bias``.

    The head's layer has the target's shape but for a given ``intermediate_size``; its rotary positions are unscaled,
    with the target's base.
    ``max_length`` (tokens) is how far it was trained, which a server must not draft beyond.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids),
        "tie_word_embeddings": target.tie_word_embeddings,
        "bias": bias,
        "dtype": "bfloat16",
    }


def write_head(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    card: str = "",
    vocabulary: DraftVocabulary | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` (bfloat16, without an embedding), model card and frequency table."""
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / "config.json", (json.dumps(dict(config), indent=2) + "\n").encode())
    write_atomically(folder / "model.safetensors", save(stored, metadata={"format": "pt"}))
    if card:
        write_atomically(folder / "README.md", card.encode())
    if vocabulary is not None:
        vocabulary.save(folder)
    assert DraftConfig.from_folder(folder).fc_bias == ("fc.bias" in stored)
