"""How a checkpoint's ``config.json`` describes rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle2.errors import ModelError

RopeKind = Literal["none", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base ``theta`` and how frequencies are scaled beyond the trained length.

    The last three fields are used by kind ``llama3`` only; ``original_max_position`` is in tokens.
    """

    theta: float
    kind: RopeKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


def read_rope(values: Mapping[str, Any], folder: Path) -> RopeConfig:
    """The rotary positions of a ``config.json``, old or new style. Raises ``ModelError`` for other kinds of scaling."""
    # transformers 5 writes one dict, rope_parameters; before, rope_theta stood beside rope_scaling.
    scaling: Mapping[str, Any] = values.get("rope_scaling") or values.get("rope_parameters") or {}
    theta = scaling.get("rope_theta")
    if theta is None:
        theta = values.get("rope_theta")
    theta = 10000.0 if theta is None else float(theta)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    partial = scaling.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"{folder}: partial_rotary_factor {partial} is not supported; supported is 1.")
    try:
        if kind == "default":
            return RopeConfig(theta, "none")
        if kind == "linear":
            return RopeConfig(theta, "linear", factor=float(scaling["factor"]))
        if kind == "llama3":
            original = values.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
            return RopeConfig(
                theta,
                "llama3",
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_max_position=int(original or values["max_position_embeddings"]),
            )
    except KeyError as error:
        raise ModelError(f"{folder}: rope scaling {kind!r} needs the key {error}, which its config lacks.") from None
    raise ModelError(f"{folder}: rope scaling {kind!r} is not supported; supported are none, 'linear' and 'llama3'.")
