"""Which rows are trained on together: batches of about equal length, the same order for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle2.training.data import Example

# Examples sorted by length within a window: little padding, and still a different mix in every epoch.
_WINDOW = 256
# Rows are padded to a multiple of this: oneDNN keeps a compiled product of 1-2 MB for every number of rows it has seen.
_ROW_STEP = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of B examples, padded at the end to T rows, a multiple of 32; row i pairs feature i with the token after it.

    next_ids: (B, T) int64, token of row i + 1, which is the row's own input.
    features: (B, T, H), true features of rows 0..T-1.
    targets:  (B, T, H), true features of rows 1..T: what the head should predict.
    answer:   (B, T) bool, whether the row's input token was written by the assistant; only these rows draft.
    lengths:  (B,) int64, rows that are no padding.
    """

    next_ids: Tensor
    features: Tensor
    targets: Tensor
    answer: Tensor
    lengths: Tensor

    def counted(self, rollout: int) -> Tensor:
        """Rows (B, T) bool that count in pass ``rollout`` (0: true features): their whole draft path is an answer."""
        return self.answer if rollout == 0 else self.answer & F.pad(self.answer[:, :-rollout], (rollout, 0))


def make_batch(examples: Sequence[Example], indices: Sequence[int], features: Callable[[int], Tensor]) -> Batch:
    """Gather the examples ``indices``; ``features(i)`` gives (T, H) of example i."""
    chosen = [(examples[i], features(i)) for i in indices]
    B, T, H = len(chosen), max(_padded_rows(len(example)) for example, _ in chosen), chosen[0][1].shape[1]
    dtype = chosen[0][1].dtype
    batch = Batch(
        torch.zeros(B, T, dtype=torch.int64),
        torch.zeros(B, T, H, dtype=dtype),
        torch.zeros(B, T, H, dtype=dtype),
        torch.zeros(B, T, dtype=torch.bool),
        torch.tensor([len(example) - 1 for example, _ in chosen]),
    )
    for b, (example, rows) in enumerate(chosen):
        n = len(example) - 1
        batch.next_ids[b, :n] = torch.from_numpy(example.ids[1:].astype("int64"))
        batch.features[b, :n] = rows[:-1]
        batch.targets[b, :n] = rows[1:]
        for start, stop in example.spans:
            batch.answer[b, max(start - 1, 0) : stop - 1] = True
    return batch


def epoch_order(lengths: Sequence[int], indices: Sequence[int], max_tokens: int, seed: int) -> list[list[int]]:
    """Shuffle ``indices`` into batches of at most ``max_tokens`` padded tokens (or one longer example).

    lengths: tokens of every example, indexed by the numbers in ``indices``.
    """
    generator = random.Random(seed)
    shuffled = list(indices)
    generator.shuffle(shuffled)
    rows = [_padded_rows(length) for length in lengths]
    windows = (sorted(window, key=lengths.__getitem__) for window in _windows(shuffled))
    batches = [batch for window in windows for batch in packed(rows, window, max_tokens)]
    generator.shuffle(batches)
    return batches


def _windows(indices: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(indices), _WINDOW):
        yield indices[start : start + _WINDOW]


def packed(sizes: Sequence[int], indices: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Cut ``indices`` into runs that hold at most ``max_tokens`` (or one larger text), each padded to its last.

    sizes: tokens of every text, indexed by the numbers in ``indices``, which ascend by it.
    """
    batch: list[int] = []
    for i in indices:
        if batch and sizes[i] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _padded_rows(length: int) -> int:
    """Rows that an example of ``length`` tokens takes: one fewer than tokens, rounded up."""
    return -(-(length - 1) // _ROW_STEP) * _ROW_STEP
