"""Whether a model's layers run as one kernel here, or operator by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle2.models.layers import LayerShape, RowLinear, Weights
from eagle2.models.linear import Linear

if TYPE_CHECKING:
    from eagle2.models.stack import LayerStack


class WideLinear:
    """A linear layer whose output is given as float32."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.tiles = linear.tiles

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x).float()


def fused_layers(
    weights: Weights, prefixes: list[str], shape: LayerShape, final_norm: Tensor | None
) -> LayerStack | None:
    """The layers as one kernel; None where this device or these sizes do not suit it."""
    if not _on_cpu(weights[f"{prefixes[0]}mlp.gate_proj.weight"]):
        return None
    from eagle2.models.stack import LayerStack  # not where a GPU does the work: Numba may be absent there

    return LayerStack(weights, prefixes, shape, final_norm) if LayerStack.fits(weights, prefixes[0], shape) else None


def stack_tiles(stack: LayerStack | None) -> tuple[int, ...] | None:
    """The row counts that a stack is called with; None without one."""
    return None if stack is None else stack.tiles


def row_linear(weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> RowLinear:
    """A linear layer with rows that do not depend on each other, in blocks where they suit it, else by oneDNN.

    ``out_dtype`` is the weight's (None) or float32.
    """
    if _on_cpu(weight):
        from eagle2.models.stack import BlockLinear

        if BlockLinear.fits(weight):
            return BlockLinear(weight, bias, out_dtype)
    linear = Linear(weight, bias)
    return linear if out_dtype in (None, weight.dtype) else WideLinear(linear)


def best_outputs(linear: RowLinear, x: Tensor, outputs: int) -> Tensor:
    """x (T, I) -> (T,) int64 on the host: the lowest of the first ``outputs`` whose number is a row's largest.

    -1 where that is no finite number. In blocks no matrix (T, O) is written.
    """
    if _on_cpu(x):
        from eagle2.models.stack import BlockLinear

        if isinstance(linear, BlockLinear):
            return linear.best(x, outputs)
    return best_columns(linear(x)[:, :outputs])


def best_columns(numbers: Tensor) -> Tensor:
    """(T, V) -> (T,) int64 on the host: the arg-max of each row, -1 where it is no finite number.

    One transfer, and the only time that a greedy step waits for its device.
    """
    best = numbers.max(dim=1)
    return torch.where(best.values.isfinite(), best.indices, -1).cpu()


def _on_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu"
