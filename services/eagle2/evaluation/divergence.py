"""Where two answers part, and whether rounding can be the reason (only on devices whose sums depend on the batch)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eagle2.engine.batch import RowsBuilder
from eagle2.kv_cache.slots import SlotPool, SlotTable
from eagle2.models.target import TargetModel

ROUNDING_GAPS = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest gap between the two best logits that counts as rounding. For bfloat16: two steps of a logit of 16 to 32."""


def best_two_gap(model: TargetModel, context: Sequence[int]) -> float:
    """Distance of the two best logits after ``context``, from one prefill of its own."""
    pool = SlotPool(len(context))
    table = SlotTable(pool)
    table.extend(len(context))
    builder = RowsBuilder()
    builder.add_span(table.slots, 0, context)
    features = model.forward(builder.build(model.device), model.new_pool(len(context)))
    first, second = model.logits(features[-1:])[0].topk(2).values.tolist()
    return float(first - second)


def is_rounding(gap: float, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether another token, where the two best logits are ``gap`` apart, is to be put down to rounding.

    Never on a CPU: there the bits are the same, and a difference is a fault.
    """
    return device.type != "cpu" and gap <= ROUNDING_GAPS[dtype]
