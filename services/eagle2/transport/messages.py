"""What crosses a pair, once per batch step: features and ids go down, trees come back. Never logits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """The part of a draft step that belongs to one sequence.

    The proposer must already hold head rows 0..base-1 of this sequence (row i pairs feature(i) with token(i+1));
    rows that it holds beyond ``base`` are dropped. R new rows follow.

    features: (R, H) the target's true features at positions base..base+R-1, in the target's dtype.
    tokens:   (R,) int64, the tokens at positions base+1..base+R; the last one is the root when ``draft`` is set.
    draft:    False only brings the head's cache up to date (a long span is sent in chunks).
    """

    sequence: int
    cycle: int
    base: int
    features: torch.Tensor
    tokens: torch.Tensor
    draft: bool = True


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
    SYNCED = 1  # rows taken, no tree was asked for
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

    ``received`` and ``finished`` are ``time.time_ns()`` on the proposer; slots are head-KV slots.
    """

    incarnation: int
    step: int
    trees: tuple[DraftTree, ...]
    received: int
    finished: int
    slots_used: int
    slots_total: int
