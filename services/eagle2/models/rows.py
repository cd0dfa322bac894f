"""The flat batch of one forward: T rows of B sequences, prompt tokens and tree nodes alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """T new tokens, those of one sequence next to each other.

    A row sees the first ``lengths[t]`` positions of its sequence's table, then the slots of its own path, the last
    of which is its own. A prompt row has no path: its own slot stands in the table, and its length counts itself.

    tokens:       (T,) int64.
    positions:    (T,) int64, absolute positions (the rotary embedding's).
    slots:        (T,) int32, where each row's key and value are written.
    starts:       (B + 1,) int32, rows starts[b]..starts[b+1]-1 belong to sequence b.
    tables:       (B, L) int32, slots by position; what lies beyond ``lengths`` is not read.
    lengths:      (T,) int32.
    paths:        (T, P) int32, slots of the path from the root to the row's own; beyond ``path_lengths`` not read.
    path_lengths: (T,) int32.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    starts: Tensor
    tables: Tensor
    lengths: Tensor
    paths: Tensor
    path_lengths: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> Rows:
        """The same rows on ``device``; a GPU gets them all in one copy that nobody waits for."""
        if self.tokens.device.type == device.type:
            return self
        parts = [getattr(self, name) for name in self.__slots__]
        if device.type != "cuda":
            return Rows(*(part.to(device) for part in parts))
        flat = torch.cat([part.flatten().int() for part in parts]).pin_memory().to(device, non_blocking=True)
        moved = flat.split([part.numel() for part in parts])
        return Rows(*(new.view(part.shape).to(part.dtype) for new, part in zip(moved, parts, strict=True)))
