"""Which tokens a draft head scores: the most frequent ones of the text that it was trained on.

A draft step is small, and the lm_head over the whole vocabulary is most of it. A token that the target hardly ever
says is hardly ever worth proposing, so the head may leave its row of the lm_head out. What comes out is decided by the
target alone; a token that is left out is never drafted, which costs acceptance where it would have been right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from eagle2.errors import ConfigError, ModelError

# In the folder of the head.
TABLE_NAME = "token_frequencies.safetensors"
# Taken where nothing is set: no size was faster in docs/benchmarks.md, and smaller ones lose more acceptance.
DEFAULT_SIZE = 8192


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """A frequency table: how often the target wrote which token, the most frequent first, and of equals the lower id.

    token_ids (n,) int32, each once; counts (n,) int64, at least 1. What was hardly or never written has no row.
    """

    token_ids: Tensor
    counts: Tensor

    @classmethod
    def from_counts(cls, counts: Tensor, at_least: int = 1) -> DraftVocabulary:
        """counts (V,): occurrences by token id, any integer dtype; tokens with fewer than ``at_least`` are left out."""
        counts = counts.to("cpu", torch.int64)
        order = counts.argsort(descending=True, stable=True)
        order = order[counts[order] >= max(at_least, 1)]
        return cls(order.to(torch.int32), counts[order])

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> DraftVocabulary | None:
        """The table that lies with a head, None where there is none.

        vocab_size: ids from there on cannot come out of the target. Raises ``ModelError`` for a table that is broken.
        """
        path = folder / TABLE_NAME
        if not path.is_file():
            return None
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read, it may be cut off: {error}") from error
        for name, dtype in (("token_ids", torch.int32), ("counts", torch.int64)):
            if name not in tensors:
                raise ModelError(f"{path} has no tensor {name}.")
            if tensors[name].dtype != dtype or tensors[name].dim() != 1:
                found = f"{tensors[name].dtype} of shape {tuple(tensors[name].shape)}"
                raise ModelError(f"{path}: {name} must be {dtype} of one dimension, not {found}.")
        table = cls(tensors["token_ids"], tensors["counts"])
        if (wrong := table._fault(vocab_size)) is not None:
            raise ModelError(f"{path}: {wrong}")
        return table

    def save(self, folder: Path) -> None:
        """Write the table into the folder of a head, where serving looks for it."""
        tensors = {"token_ids": self.token_ids.contiguous(), "counts": self.counts.contiguous()}
        # Not by save_file, whose files only their owner may read.
        (folder / TABLE_NAME).write_bytes(save(tensors))

    def __len__(self) -> int:
        return len(self.token_ids)

    def most_frequent(self, n: int, always: Iterable[int] = ()) -> Tensor:
        """At most ``n`` ids, ascending (m,) int64: ``always``, and the most frequent others. All that there are where
        the table is shorter; ``always`` whole where that is more than ``n``."""
        kept = torch.tensor(sorted(set(always)), dtype=torch.int64)
        ids = self.token_ids.long()
        others = ids[~torch.isin(ids, kept)]
        return torch.cat([kept, others[: max(n - len(kept), 0)]]).sort().values

    def coverage(self, ids: Tensor) -> float:
        """The share of the counted tokens that ``ids`` (m,) are."""
        return float(self.counts[torch.isin(self.token_ids.long(), ids)].sum() / self.counts.sum())

    def _fault(self, vocab_size: int) -> str | None:
        ids, counts = self.token_ids.long(), self.counts
        if len(ids) == 0 or len(ids) != len(counts):
            return f"it has {len(ids)} token ids and {len(counts)} counts; it needs as many of both, and at least one."
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            return f"the token id {int(outside[0])} is outside the target's vocabulary of {vocab_size} tokens."
        values, times = ids.unique(return_counts=True)
        if len(values) < len(ids):
            return f"the token id {int(values[times > 1][0])} stands there more than once."
        if int(counts.min()) < 1:
            return f"the token id {int(ids[counts < 1][0])} has the count {int(counts[counts < 1][0])}, less than 1."
        rises = (counts[1:] > counts[:-1]).nonzero()
        if len(rises):
            row = int(rises[0])
            return f"its counts are not descending: {int(counts[row])} in row {row}, then {int(counts[row + 1])}."
        return None


def scored_ids(
    size: int | Literal["auto", "all"], table: DraftVocabulary | None, folder: Path, eos_token_ids: Iterable[int]
) -> Tensor | None:
    """The ids that a head scores, ascending (m,) int64, or None for all; the end tokens are always among them.

    ``auto`` is ``DEFAULT_SIZE`` where the table has as many rows: a shorter one was counted over too little text, or
    the vocabulary is so small that nothing is gained. Raises ``ConfigError`` for a number without a table.
    """
    if size == "all" or (size == "auto" and (table is None or len(table) < DEFAULT_SIZE)):
        return None
    if table is None:
        raise ConfigError(
            f"draft_vocabulary is {size}, but the draft head has no table of frequencies: {folder / TABLE_NAME} is "
            "not there. Set it to 'all' or leave it out."
        )
    return table.most_frequent(DEFAULT_SIZE if size == "auto" else size, eos_token_ids)
