"""How sure a ratio is that was measured in several rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Student's t, 95 %, by degrees of freedom from 1 on; beyond, a series that is right to three digits.
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean over rounds with its 90 % interval, of which a single round says nothing."""

    mean: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.mean:.2f}"
        low, high = self.interval
        return f"{self.mean:.2f} [{low:.2f}, {high:.2f}]"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """``ours`` by ``theirs``, round by round, all positive.

    What the machine did in a round befell both, so rounds are compared within themselves: the mean and its t interval
    are those of the logarithms of the ratios.
    """
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), None)
    half = _t95(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), (math.exp(mean - half), math.exp(mean + half)))


def _t95(freedom: int) -> float:
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return 1.6449 + 1.5238 / freedom + 1.4 / freedom**2


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that ``share`` of them do not exceed; None where there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
