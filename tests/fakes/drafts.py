"""Draft handlers without a network: they keep the books of a proposer and draft what a test wants."""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep, DraftTree

# (token, parent with the root as node 0, score) of each drafted node, in tree order
Nodes = list[tuple[int, int, float]]


class BookkeepingHandler(ABC):
    """A ``DraftHandler`` that remembers each sequence's tokens as the real one remembers its head rows.

    ``context_of(sequence)`` gives a sequence's tokens as far as the test knows them; only position 0 is read, the one
    token that never crosses a link. ``slots`` bounds the rows of all sequences together.
    """

    def __init__(
        self,
        *,
        context_of: Callable[[int], Sequence[int]] = lambda _: (0,),
        incarnation: int = 0,
        slots: int = 1 << 20,
    ) -> None:
        self.incarnation = incarnation
        self.steps: list[DraftStep] = []
        self.resets = 0
        self._context_of = context_of
        self._slots = slots
        self._rows: dict[int, list[int]] = {}

    def held(self, sequence: int) -> int:
        """Rows held for a sequence, 0 when it is not known."""
        return len(self._rows.get(sequence, ()))

    def reset(self) -> None:
        self.resets += 1
        self._rows.clear()

    def handle(self, step: DraftStep) -> DraftReply:
        received = time.time_ns()
        self.steps.append(step)
        for sequence in step.closed:
            self._rows.pop(sequence, None)
        trees = tuple(self._answer(step, entry) for entry in step.entries)
        used = sum(map(len, self._rows.values()))
        return DraftReply(self.incarnation, step.step, trees, received, time.time_ns(), used, self._slots)

    @abstractmethod
    def draft(self, context: list[int], step: DraftStep) -> Nodes:
        """The tree below the last token of ``context`` (every token from position 0 to the root)."""

    def _answer(self, step: DraftStep, entry: DraftEntry) -> DraftTree:
        rows = self._rows.get(entry.sequence, [])
        if len(rows) < entry.base:
            return _tree(entry, DraftStatus.MISSING, len(rows))
        if not bool(entry.features.isfinite().all()):
            self._rows.pop(entry.sequence, None)
            return _tree(entry, DraftStatus.NON_FINITE, 0)
        kept = rows[: entry.base]
        others = sum(len(tokens) for sequence, tokens in self._rows.items() if sequence != entry.sequence)
        if others + len(kept) + entry.tokens.shape[0] > self._slots:
            return _tree(entry, DraftStatus.FULL, len(rows))
        rows = kept + entry.tokens.tolist()
        self._rows[entry.sequence] = rows
        if not entry.draft:
            return _tree(entry, DraftStatus.SYNCED, len(rows))
        context = [self._context_of(entry.sequence)[0], *rows]
        return _tree(entry, DraftStatus.OK, len(rows), self.draft(context, step))


class OracleHandler(BookkeepingHandler):
    """Drafts the chain that ``continuation(context)`` names: a verifier accepts as far as the oracle is right."""

    def __init__(
        self,
        continuation: Callable[[list[int]], list[int]],
        *,
        context_of: Callable[[int], Sequence[int]] = lambda _: (0,),
        incarnation: int = 0,
        slots: int = 1 << 20,
    ) -> None:
        super().__init__(context_of=context_of, incarnation=incarnation, slots=slots)
        self._continuation = continuation

    def draft(self, context: list[int], step: DraftStep) -> Nodes:
        chain = self._continuation(context)[: min(step.depth, step.num_draft_tokens)]
        return [(token, index, -0.01 * (index + 1)) for index, token in enumerate(chain)]


class RandomHandler(BookkeepingHandler):
    """Drafts well-formed trees of random tokens: the same tree for the same seed and context."""

    def __init__(
        self,
        seed: int,
        vocab_size: int,
        *,
        context_of: Callable[[int], Sequence[int]] = lambda _: (0,),
        incarnation: int = 0,
        slots: int = 1 << 20,
    ) -> None:
        super().__init__(context_of=context_of, incarnation=incarnation, slots=slots)
        self._seed = seed
        self._vocab_size = vocab_size

    def draft(self, context: list[int], step: DraftStep) -> Nodes:
        choice = random.Random(f"{self._seed} {context}")
        nodes: Nodes = []
        level = [(0, 0.0)]  # node and score of those that may get children
        for _ in range(step.depth):
            children: list[tuple[int, float]] = []
            for parent, score in level:
                for token in choice.sample(range(self._vocab_size), min(step.top_k, self._vocab_size)):
                    if len(nodes) == step.num_draft_tokens:
                        return nodes
                    below = score + math.log(1.0 - choice.random())
                    nodes.append((token, parent, below))
                    children.append((len(nodes), below))
            beam = choice.sample(children, min(step.top_k, len(children)))
            level = sorted(beam)
        return nodes


def _tree(entry: DraftEntry, status: DraftStatus, held: int, nodes: Nodes | None = None) -> DraftTree:
    tokens, parents, scores = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(
        entry.sequence,
        entry.cycle,
        status,
        held,
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(parents, dtype=torch.int64),
        torch.tensor(scores, dtype=torch.float32),
    )
