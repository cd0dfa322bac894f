"""A differing token is rounding only where the device's sums may differ and the two best are close."""

from __future__ import annotations

import pytest
import torch

from eagle2.evaluation.divergence import ROUNDING_GAPS, best_two_gap, is_rounding
from golden_pair import PooledTarget, load_target

CONTEXT = [256, *b"the old sailor "]


def test_gap_is_that_of_the_logits() -> None:
    model = load_target("A")
    first, second = PooledTarget(model, [CONTEXT]).prompt_logits[0].topk(2).values.tolist()
    assert best_two_gap(model, CONTEXT) == first - second > 0


@pytest.mark.parametrize("dtype", ROUNDING_GAPS, ids=str)
def test_never_on_a_cpu_and_elsewhere_only_below_the_bound(dtype: torch.dtype) -> None:
    bound = ROUNDING_GAPS[dtype]
    for gap in (0.0, bound / 2, bound, bound * 1.01, 5.0):
        assert not is_rounding(gap, dtype, torch.device("cpu"))
        assert is_rounding(gap, dtype, torch.device("cuda")) == (gap <= bound)
