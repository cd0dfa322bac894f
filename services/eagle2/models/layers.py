"""The parts that target and draft head share: norm, rotary table, one decoder layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle2.models.architecture import RopeConfig
from eagle2.models.attention import KVPool, RowLayout, as_array
from eagle2.models.linear import Linear, row_plan

with suppress(ModuleNotFoundError):  # a machine whose models all run on its GPU does without Numba
    from eagle2.models import kernels

Weights = Mapping[str, Tensor]


class LayerShape(Protocol):
    """What a decoder layer must know; ``TargetConfig`` and ``DraftConfig`` both have it."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class RowLinear(Protocol):
    """A linear layer whose rows do not depend on each other; ``tiles`` are the row counts that it is called with."""

    @property
    def tiles(self) -> tuple[int, ...] | None: ...
    def __call__(self, x: Tensor, /) -> Tensor: ...


class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps
        self._array = as_array(weight) if weight.device.type == "cpu" else None

    def __call__(self, x: Tensor, count: int | None = None) -> Tensor:
        """x (T, ..., H). Rows from ``count`` on are padding, whose values do not matter."""
        if self._array is None:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        # One small kernel instead of torch's several operators, which take longer than a layer's smallest product.
        rows = x.reshape(-1, 1, x.shape[-1])
        out = torch.zeros_like(rows)
        used = rows.shape[0] if count is None else count * (rows.shape[0] // x.shape[0])
        kernels.rms_norm(as_array(rows.squeeze(1)), self._array, np.float32(self._eps), used, as_array(out))
        return out.view(x.shape)


class RotaryTable:
    """cos and sin of every position up to a limit, (positions, D/2) float32."""

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """(D/2,) float32, radians a position. llama3 scaling as in Llama 3.1: long waves are stretched, short ones kept."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / frequencies
        turns = rope.original_max_position / wavelength
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return frequencies


class DecoderLayer:
    """One Llama-family layer with fused qkv and gate-up projections.

    ``input_norm`` is absent in an EAGLE head. Optional biases and q/k norms are taken where the weights have them.
    """

    def __init__(self, weights: Weights, prefix: str, shape: LayerShape) -> None:
        self._shape = shape
        eps = shape.rms_norm_eps

        def norm(name: str) -> RMSNorm | None:
            weight = weights.get(f"{prefix}{name}.weight")
            return None if weight is None else RMSNorm(weight, eps)

        def linear(*names: str) -> Linear:
            matrices = [weights[f"{prefix}{name}.weight"] for name in names]
            biases = [bias for name in names if (bias := weights.get(f"{prefix}{name}.bias")) is not None]
            return Linear(torch.cat(matrices), torch.cat(biases) if biases else None)

        self._input_norm = norm("input_layernorm")
        self._qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._query_norm, self._key_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        self._output = linear("self_attn.o_proj")
        self._mlp_norm = norm("post_attention_layernorm")
        self._gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self._down = linear("mlp.down_proj")

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self._qkv, self._output, self._gate_up, self._down

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, layout: RowLayout, pool: KVPool, layer: int) -> Tensor:
        """x (T', H), T' the padded rows of ``layout`` -> (T', H). Writes the rows' keys and values into the pool."""
        assert self._mlp_norm is not None
        count = len(layout.rows)
        qkv = self._qkv(x if self._input_norm is None else self._input_norm(x, count))
        if self._query_norm is not None:
            qkv = self._normed_heads(qkv)
        x = x + self._output(layout.attend(qkv, cos, sin, pool, layer, self._shape.num_heads))
        return x + self._down(gated(self._gate_up(self._mlp_norm(x, count)), count))

    def _normed_heads(self, qkv: Tensor) -> Tensor:
        assert self._query_norm is not None
        assert self._key_norm is not None
        shape = self._shape
        q, k, v = qkv.view(qkv.shape[0], -1, shape.head_dim).split(
            [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1
        )
        return torch.cat([self._query_norm(q), self._key_norm(k), v], dim=1).flatten(1)


def gated(gate_up: Tensor, count: int) -> Tensor:
    """silu(gate) * up; (T, 2I) -> (T, I). Rows from ``count`` on are padding."""
    if gate_up.device.type != "cpu":
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    out = torch.zeros(gate_up.shape[0], 1, gate_up.shape[1] // 2, dtype=gate_up.dtype)
    kernels.silu_multiply(as_array(gate_up), count, as_array(out))
    return out.squeeze(1)


def common_tiles(linears: Sequence[RowLinear]) -> tuple[int, ...] | None:
    """Row counts that suit all of these layers, so that a batch is padded once and not at each of them."""
    sets = [set(linear.tiles) for linear in linears if linear.tiles is not None]
    return tuple(sorted(set.intersection(*sets))) if sets else None


def padded_rows(rows: int, tiles: tuple[int, ...] | None) -> int:
    return rows if tiles is None else sum(row_plan(rows, tiles))
