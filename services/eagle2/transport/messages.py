"""What crosses a pair, once per batch step: features and ids go down, trees come back. Never logits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

TENANT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Opening:
    """How a sequence begins: with it a proposer finds rows that it holds of earlier sequences, and keeps new ones.

    tenant: ``TENANT_BYTES`` bytes that stand for whose text it is; nothing is shared between two of them.
    tokens: (P,) int64, the tokens at positions 0..P-1, at least one.
    """

    tenant: bytes
    tokens: torch.Tensor

    @classmethod
    def of(cls, tenant: str, tokens: Sequence[int]) -> Opening:
        digest = hashlib.blake2b(tenant.encode(), digest_size=TENANT_BYTES).digest()
        return cls(digest, torch.tensor(tokens, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """The part of a draft step that belongs to one sequence.

    The proposer must already hold head rows 0..base-1 of this sequence (row i pairs feature(i) with token(i+1));
    rows that it holds beyond ``base`` are dropped. R new rows follow.

    features: (R, H) the target's true features at positions base..base+R-1, in the target's dtype.
    tokens:   (R,) int64, the tokens at positions base+1..base+R; the last one is the root when ``draft`` is set.
    draft:    False only brings the head's cache up to date (a long span is sent in chunks).
    opening:  told until the proposer has answered it once; its tokens reach up to ``base`` when rows follow. Without
              it a sequence is drafted for all the same, but shares nothing. Without rows and without ``draft`` it asks
              how many rows are held, those of this step's other entries among them, and drops none.
    """

    sequence: int
    cycle: int
    base: int
    features: torch.Tensor
    tokens: torch.Tensor
    draft: bool = True
    opening: Opening | None = None

    @property
    def only_asks(self) -> bool:
        """Nothing follows but the opening."""
        return self.opening is not None and not self.draft and not len(self.tokens)


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One message from a verifier to its proposer.

    ``incarnation`` is the verifier's, ``step`` counts its messages. ``depth``, ``top_k`` and
    ``num_draft_tokens`` (per sequence) bound the trees. ``closed`` names sequences whose rows are to be freed
    before the entries are handled.
    """

    incarnation: int
    step: int
    depth: int
    top_k: int
    num_draft_tokens: int
    entries: tuple[DraftEntry, ...]
    closed: tuple[int, ...] = ()


class DraftStatus(IntEnum):
    """Why an entry has a tree or none."""

    OK = 0
    SYNCED = 1  # rows taken, if there were any; no tree was asked for
    MISSING = 2  # fewer rows held than ``base``; ``held`` says how many
    FULL = 3  # no slots free for this sequence
    NON_FINITE = 4  # a feature or an output was NaN or infinite; this sequence's rows were dropped
    TOO_LONG = 5  # positions beyond what the head was trained for; nothing was taken


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The reply to one entry. Nodes are drafted tokens only (the root is the verifier's own).

    tokens:  (N-1,) int64.
    parents: (N-1,) int64, index into the nodes *with* the root as node 0; parents[i] <= i.
    scores:  (N-1,) float32, natural-log probability of the path under the draft.
    held:    head rows that the proposer holds now for this sequence.
    """

    sequence: int
    cycle: int
    status: DraftStatus
    held: int
    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftReply:
    """One message back. ``incarnation`` is the proposer's; ``step`` repeats the question's.

    ``received`` and ``finished`` are ``time.time_ns()`` on the proposer; slots are head-KV slots: those that sequences
    hold, all there are, and those kept for texts that may come again, which count as free.
    """

    incarnation: int
    step: int
    trees: tuple[DraftTree, ...]
    received: int
    finished: int
    slots_used: int
    slots_total: int
    slots_cached: int = 0
