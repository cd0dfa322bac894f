"""The rising sequence that lies nearest to measured values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Weighted least squares under the condition that nothing falls: pool adjacent violators (Barlow et al. 1972).

    values (M,), weights (M,) above 0. Returns (M,), rising or level.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many values
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while blocks and blocks[-1][0] >= value:
            mean, other, members = blocks.pop()
            value = (mean * other + value * weight) / (other + weight)
            weight, count = other + weight, count + members
        blocks.append((value, weight, count))
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])
