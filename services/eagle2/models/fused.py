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


def _on_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu"
