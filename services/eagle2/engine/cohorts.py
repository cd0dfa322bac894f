"""Whose turn it is: the whole batch, or one half of it while the proposer drafts for the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from eagle2.engine.drafting import Asked, Decoding, Drafting
from eagle2.engine.overlap import OverlapChoice, StepTimes, Way
from eagle2.engine.sequence import Sequence
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder


class Cohorts:
    """Gives each step its trees. In the order of a step: ``turn``, ``verified``; ``idle`` when there is nothing to do.

    There are no fixed halves: whoever is not being verified is asked for next, half of all that decode at most. So
    sequences come, go and are put back at any time, and nobody waits for more than one step of the others.
    """

    def __init__(
        self,
        drafting: Drafting,
        choice: OverlapChoice,
        stats: Recorder,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafting, self._choice, self._stats, self._clock = drafting, choice, stats, clock
        self._asked: Asked | None = None  # for the next step, while this one verifies
        self._was_asked = self._has_drafted = False  # at this step: before it began; at all
        self._lengths: list[tuple[Sequence, int]] = []  # of those whose turn it is, with their tokens before it
        self._began = self._drafted = 0.0
        self._trials = 0
        self._ended: float | None = None  # the step before, unless nothing was done since

    @property
    def turns(self) -> int:
        """Steps from one of a sequence to its next. With two, the proposer drafts while this one verifies."""
        return 1 if self._asked is None else 2

    def turn(self, running: SequenceOf[Sequence]) -> list[Decoding]:
        """The trees of those whose turn it is. With two halves, the other one is asked for before this returns."""
        self._began = self._clock()
        decoding = sum(sequence.decodes for sequence in running)
        is_split = self._choice.is_split(decoding) and self._drafting.is_possible
        asked, self._asked = self._asked, None
        self._was_asked = asked is not None
        if asked is None:
            asked = self._drafting.ask(_half(running, decoding) if is_split else running)
            if asked.question is None:
                asked.sequences = list(running)  # nobody drafts: halves would gain nothing
        self._has_drafted = asked.question is not None
        decodings = self._drafting.collect(asked, is_alone=not self._was_asked)
        if is_split and self._has_drafted:
            self._ask_for_others(running, asked, decoding)
        self._lengths = [(item.sequence, len(item.sequence.tokens)) for item in decodings]
        self._drafted = self._clock()
        return decodings

    def verified(self, *, has_prefill: bool) -> None:
        """The step is over."""
        now = self._clock()
        way: Way = "other"
        if self._has_drafted and not has_prefill and self._was_asked == (self._asked is not None):
            way = "split" if self._was_asked else "serial"
        self._choice.observe(
            StepTimes(
                way=way,
                sequences=len(self._lengths),
                tokens=sum(len(sequence.tokens) - before for sequence, before in self._lengths),
                seconds=now - (self._began if self._ended is None else self._ended),
                draft_s=self._drafted - self._began,
                verify_s=now - self._drafted,
            )
        )
        self._ended, self._lengths = now, []  # who has ended is not kept alive
        self._stats.add(metrics.OVERLAPPED_STEPS, self._asked is not None)
        self._stats.add(metrics.OVERLAP_TRIALS, self._choice.num_trials - self._trials)
        self._trials = self._choice.num_trials

    def idle(self) -> None:
        """Nothing is to be done. Trees that are still to come were for sequences that are gone."""
        if self._asked is not None:
            self._drafting.collect(self._asked, is_alone=False)
        self._asked = self._ended = None

    def _ask_for_others(self, running: SequenceOf[Sequence], asked: Asked, decoding: int) -> None:
        others = _half([sequence for sequence in running if sequence not in asked.sequences], decoding)
        if any(sequence.decodes for sequence in others):
            question = self._drafting.ask(others)
            self._asked = None if question.question is None else question


def _half(sequences: Iterable[Sequence], decoding: int) -> list[Sequence]:
    """The first of ``sequences``, as many of those that decode as are half of ``decoding``, and all that do not."""
    left = -(-decoding // 2)
    half = []
    for sequence in sequences:
        if not sequence.decodes or left > 0:
            half.append(sequence)
            left -= sequence.decodes
    return half
