"""What the proposer is asked about the batch, and the trees that become of its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from eagle2.engine.briefing import Briefing
from eagle2.engine.choice import FixedTrees
from eagle2.engine.pace import PromptPace
from eagle2.engine.pair import Pair, Question
from eagle2.engine.sequence import Sequence
from eagle2.engine.trees import Forest, forest_of
from eagle2.kv_cache.slots import Slots
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.transport.messages import DraftEntry, DraftStatus, DraftTree


@dataclass(slots=True)
class Decoding:
    """A sequence's part in a step: its tree, and the slots of the tree's nodes once they have some."""

    sequence: Sequence
    tree: Forest  # of this one tree
    slots: Slots = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(slots=True)
class Asked:
    """Sequences whose turn comes next, and what the proposer was asked about them. question: None when it was not."""

    sequences: list[Sequence]
    entries: list[tuple[Sequence, DraftEntry]]
    question: Question | None
    seconds: float  # that asking took


class Drafting:
    """Brings the proposer up to date and gets trees. Whoever has none decodes plainly: a tree of its root alone.

    ``pace``: how many prompt tokens a step takes.
    """

    def __init__(
        self,
        pair: Pair,
        briefing: Briefing,
        trees: FixedTrees,
        stats: Recorder,
        *,
        vocab_size: int,
        pace: PromptPace,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pair, self._briefing, self._trees, self._stats = pair, briefing, trees, stats
        self._vocab_size, self._pace, self._clock = vocab_size, pace, clock

    @property
    def is_possible(self) -> bool:
        """Whether there is a proposer."""
        return self._pair.is_up

    def ask(self, sequences: SequenceOf[Sequence]) -> Asked:
        """Tell the proposer what it lacks of some sequences and ask for their trees, without waiting for them."""
        if self._pair.is_up:
            self._trees.begin(sequences, self._prompt_rows(sequences))
        wanted = []
        if self._pair.is_up:
            wanted = [sequence for sequence in sequences if sequence.speculate and self._trees.is_wanted(sequence)]
        entries = self._briefing.entries(wanted)
        began = self._clock()
        question = self._pair.ask([entry for _, entry in entries], self._trees.shape) if entries else None
        return Asked(list(sequences), entries, question, self._clock() - began)

    def collect(self, asked: Asked, *, is_alone: bool = True) -> list[Decoding]:
        """The trees of all sequences that were asked about and decode.

        is_alone: nothing else was done in the meantime, so that the time this took is that of the trees. What became
        of a sequence since it was asked about does not matter: an answer to an earlier cycle is dropped.
        """
        began = self._clock()
        replies = self._pair.collect(asked.question)
        if is_alone:
            self._trees.drafted([entry for _, entry in asked.entries], replies, asked.seconds + self._clock() - began)
        current: dict[int, DraftTree] = {}
        for sequence, entry in asked.entries:
            reply = replies.get((entry.sequence, entry.cycle))
            if reply is None:
                continue
            if sequence.cycle == entry.cycle:
                self._briefing.answered(sequence, entry, reply)
                current[sequence.id] = reply
            else:
                self._stats.add(metrics.STALE_REPLIES)
        return self._decodings(asked.sequences, current)

    def _prompt_rows(self, running: SequenceOf[Sequence]) -> int:
        """About how many prompt tokens this step will take."""
        reading = [sequence for sequence in running if sequence.num_to_prefill > 0]
        if not reading:
            return 0
        allowance = self._pace.allowance(sum(sequence.decodes for sequence in running))
        return allowance.fit(len(reading[0].table), sum(sequence.num_to_prefill for sequence in reading))

    def _decodings(self, sequences: SequenceOf[Sequence], replies: Mapping[int, DraftTree]) -> list[Decoding]:
        usable = [(sequence, self._usable(sequence, replies.get(sequence.id))) for sequence in sequences]
        decoding = [(sequence, reply) for sequence, reply in usable if sequence.decodes]
        if not decoding:
            return []
        roots = [sequence.tokens[-1] for sequence, _ in decoding]
        forest, num_wrong = forest_of(roots, [reply for _, reply in decoding], self._vocab_size)
        if num_wrong:
            self._stats.add(metrics.STALE_REPLIES, num_wrong)
        trees = self._trees.pruned(forest).split()
        return [Decoding(sequence, tree) for (sequence, _), tree in zip(decoding, trees, strict=True)]

    def _usable(self, sequence: Sequence, reply: DraftTree | None) -> DraftTree | None:
        """What the proposer sent for a sequence, if it sent a tree that is wanted."""
        if reply is None:
            return None
        if reply.status == DraftStatus.TOO_LONG:
            sequence.speculate = False  # the head was not trained for such positions: plain decoding from here
        elif reply.status == DraftStatus.NON_FINITE:
            self._stats.add(metrics.NON_FINITE_DRAFTS)
        elif reply.status == DraftStatus.OK and sequence.decodes:
            return reply
        return None
