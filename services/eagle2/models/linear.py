"""Linear layers whose rows do not depend on each other, bit for bit, on a CPU.

oneDNN picks another kernel, with another order of sums, for other numbers of rows; which ones differ depends on the
CPU (with AMX even 32 and 33 rows may). So each weight shape is probed once for the row counts that agree, and every
call is cut and padded to those.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

# Row counts that are tried; those that agree with the canonical one may be used. Where small and large counts take
# different kernels (AMX), the large ones win: padding a decoding batch costs little, since a step is bound by reading
# weights, and a prompt in pieces of 32 rows would read them again and again.
_CANONICAL = 64
_TILES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256)
# Weights beyond this size (an lm_head) are probed up to the canonical count only: they see few rows at once.
_LARGE = 1 << 23


class Linear:
    """y = x W^T + b for a frozen weight, packed once for oneDNN where that exists.

    weight (O, I); x (T, I) -> (T, O), same dtype. ``tiles`` are the row counts that a packed call may
    have; None where the weight is not packed, and any count will do.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self.tiles: tuple[int, ...] | None = None
        if packs(weight):
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _CANONICAL)
            self.tiles = invariant_tiles(self.out_features, self.in_features, weight.dtype, torch.get_num_threads())
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if self.tiles is None:
            return F.linear(x, self._weight, self._bias)
        rows = x.shape[0]
        plan = row_plan(rows, self.tiles)
        if len(plan) == 1 and plan[0] == rows:
            return self._call(x)
        if sum(plan) != rows:
            x = F.pad(x, (0, 0, 0, sum(plan) - rows))
        return torch.cat([self._call(part) for part in x.split(plan)])[:rows]

    def _call(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]


def packs(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight: on a CPU, float32, or bfloat16 where the CPU supports it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def row_plan(rows: int, tiles: tuple[int, ...]) -> list[int]:
    """Row counts, all of them tiles, that cover ``rows``: the largest tile while it fits, then the smallest that holds
    the rest."""
    largest = tiles[-1]
    plan = [largest] * (rows // largest)
    rest = rows % largest
    if rest:
        plan.append(next(tile for tile in tiles if tile >= rest))
    return plan


@lru_cache(maxsize=256)
def invariant_tiles(outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> tuple[int, ...]:
    """Row counts for which this shape's kernel gives a row the canonical bits, ascending.

    The probe's weights and inputs cancel to nothing, so that what is left *is* the rounding: another order of sums
    shows in nearly every output.
    """
    del threads  # part of the cache key: the work may be cut differently
    generator = torch.Generator().manual_seed(outputs * 31 + inputs)
    half = inputs // 2
    rows = _CANONICAL if outputs * inputs > _LARGE else max(_TILES)
    order = torch.randperm(2 * half, generator=generator)
    base = torch.randn(outputs, half, generator=generator)
    values = torch.randn(rows, half, generator=generator)
    weight, x = torch.zeros(outputs, inputs, dtype=dtype), torch.zeros(rows, inputs, dtype=dtype)
    weight[:, : 2 * half] = torch.cat([base, -base], dim=1)[:, order].to(dtype)
    x[:, : 2 * half] = torch.cat([values, values], dim=1)[:, order].to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _CANONICAL)

    def outputs_of(tile: int) -> Tensor:
        parts = x[: rows // tile * tile].split(tile)
        return torch.cat([torch.ops.mkldnn._linear_pointwise(part, packed, None, "none", [], "") for part in parts])

    canonical = outputs_of(_CANONICAL)

    def agrees(tile: int) -> bool:
        result = outputs_of(tile)
        return torch.equal(result, canonical[: len(result)])

    return tuple(tile for tile in _TILES if tile <= rows and (tile == _CANONICAL or agrees(tile)))
