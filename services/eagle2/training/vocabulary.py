"""Which tokens a target really writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagle2.training.data import Example


def frequent_ids(examples: Sequence[Example], vocab_size: int, count: int) -> tuple[Tensor, float]:
    """The ``count`` most frequent ids of all answers, ascending (count,) int64, and the share of answers they cover."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for example in examples:
        for start, stop in example.spans:
            counts += np.bincount(example.ids[start:stop], minlength=vocab_size)
    # Stable, so that the choice among equally rare tokens does not depend on the machine.
    chosen = np.sort(np.argsort(-counts, kind="stable")[:count])
    return torch.from_numpy(chosen), float(counts[chosen].sum() / max(1, counts.sum()))
