"""Whether the batch is split in two, so that the proposer drafts for one half while the target verifies the other.

Serially a step takes D(n) + V(n) seconds, drafting and verifying for n sequences. Split, a round of all of them takes
twice the longer one of D(n/2) and V(n/2), and what the two sides slow each other down by on cores that they share. That
last part is known to nobody, so the other way is tried for a few steps now and then (``engine/trials.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eagle2.config import Overlap
from eagle2.engine.trials import Trials, size_of

_TRIAL_SHARE = 0.02  # of the time goes into trials at most
_MARGIN = 1.03  # splitting must be this much better before it is taken up
_PRIOR = 200.0  # steps of a sequence: both ways yield the same, but for what the sequences happen to be
_MEMORY = 1000
_COST_RATE = 0.1


Way = Literal["serial", "split", "other"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step that decoded so many sequences and committed so many tokens for them.

    seconds: from the end of the step before to the end of this one. draft_s, verify_s: its parts, where it did both.
    way: "serial" drafted and verified for all, "split" verified a part while the proposer drafted for the others;
    "other" tells nothing about either: one that read prompts, drafted nothing, or came between the two ways.
    """

    way: Way
    sequences: int
    tokens: int
    seconds: float
    draft_s: float = 0.0
    verify_s: float = 0.0


@dataclass(slots=True)
class _SerialCosts:
    """What serial steps take for about so many sequences, seconds."""

    draft_s: float = 0.0
    verify_s: float = 0.0


class OverlapChoice:
    """``setting``: "on" splits whatever there is to split, "off" nothing, "auto" where it has been seen to pay."""

    def __init__(self, setting: Overlap) -> None:
        self._setting = setting
        self._trials = Trials(share=_TRIAL_SHARE, margin=_MARGIN, memory=_MEMORY, prior=_PRIOR)
        self._costs: dict[int, _SerialCosts] = {}
        self._sequences = 0  # of the step that was asked about last

    @property
    def num_trials(self) -> int:
        return self._trials.num_trials

    def is_split(self, sequences: int) -> bool:
        """Whether a step that finds so many sequences that decode is split."""
        self._sequences = sequences
        if self._setting != "auto" or sequences < 1:
            self._trials.pause()
            return self._setting == "on" and sequences > 1
        return self._trials.is_other(sequences)

    def observe(self, step: StepTimes) -> None:
        """What the step took for which ``is_split`` was asked."""
        if self._setting != "auto" or self._sequences < 1:
            return
        if step.way == "serial":
            costs = self._costs.setdefault(size_of(self._sequences), _SerialCosts())
            rate = _COST_RATE if costs.verify_s else 1.0
            costs.draft_s += rate * (step.draft_s - costs.draft_s)
            costs.verify_s += rate * (step.verify_s - costs.verify_s)
        is_split = {"serial": False, "split": True, "other": None}[step.way]
        # Whoever is split goes back now and then; whoever is not must have something to gain.
        is_known_to_pay = bool(self._trials.judged(self._sequences))
        may_try = is_known_to_pay or self.expected_gain(self._sequences) >= _MARGIN
        self._trials.observe(is_split, step.sequences, step.tokens, step.seconds, may_try=may_try)

    def expected_gain(self, sequences: int) -> float:
        """Split over serial steps per second at best, by what serial steps took; 1 where nothing is known yet.

        Where half as many sequences have been served, their costs tell; else drafting and verifying half as many is
        taken to need half the time.
        """
        costs = self._costs.get(size_of(sequences))
        if sequences < 2 or costs is None:
            return 1.0
        longer = max(costs.draft_s, costs.verify_s) / 2
        half = self._costs.get(size_of(sequences // 2))
        if half is not None and half is not costs:
            longer = max(longer, half.draft_s, half.verify_s)
        return (costs.draft_s + costs.verify_s) / (2 * longer)
