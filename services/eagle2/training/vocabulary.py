"""Which tokens a target really writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eagle2.models.draft_vocabulary import DraftVocabulary
from eagle2.training.data import Example


def answer_frequencies(examples: Sequence[Example], vocab_size: int) -> DraftVocabulary:
    """How often each of ``vocab_size`` ids stands in the answers of ``examples``."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for example in examples:
        for start, stop in example.spans:
            counts += np.bincount(example.ids[start:stop], minlength=vocab_size)
    return DraftVocabulary.from_counts(torch.from_numpy(counts))
