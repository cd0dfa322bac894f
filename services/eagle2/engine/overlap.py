"""Whether the batch is split in two, so that the proposer drafts for one half while the target verifies the other.

Serially a step takes D(n) + V(n) seconds, drafting and verifying for n sequences. Split, a round of all of them takes
twice the longer one of D(n/2) and V(n/2), and what the two sides slow each other down by on cores that they share. That
last part is known to nobody, so the other way is tried for a few steps now and then, and the better one is kept.

Only numbers in, decisions out: whoever runs the steps passes the seconds in, so the same measurements give the same
decisions. What is decided changes speed alone, never a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from eagle2.config import Overlap

_TRIAL_SHARE = 0.02  # of the time goes into trials at most
_TRIAL_STEPS = 8
_FEWEST = 5  # steps that a trial, or what it is compared with, rests on
_TRIALS = 2  # before anything is changed
_MARGIN = math.log(1.03)  # splitting must be this much better before it is taken up
_REFUTED = 3  # trials in a row that speak for what is done make the next ones rarer, so many of them at most
_RECENT, _LONG = 0.95, 0.999  # what a step keeps of the weight of those before it
_PRIOR = 200.0  # parts of steps that the tokens of a way are taken to be those of both before they are seen
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
class _Sum:
    """Steps of one way: parts of steps (sequences), tokens and seconds, the old ones for less."""

    parts: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0

    def add(self, step: StepTimes, keep: float) -> None:
        self.parts = keep * self.parts + step.sequences
        self.tokens = keep * self.tokens + step.tokens
        self.seconds = keep * self.seconds + step.seconds
        self.steps = keep * self.steps + 1


@dataclass(slots=True)
class _Load:
    """What is known for about so many sequences. gain: log of split over serial tokens per second, over the trials."""

    size: int
    is_split: bool = False
    gain: float = 0.0
    trials: int = 0
    refuted: int = 0
    draft_s: float = 0.0  # of serial steps
    verify_s: float = 0.0
    since_s: float = 0.0  # the last trial
    recent: _Sum = field(default_factory=_Sum)  # of the way that is in use
    long: dict[bool, _Sum] = field(default_factory=lambda: {False: _Sum(), True: _Sum()})  # by is_split
    trial: _Sum | None = None
    left: int = 0  # steps of the trial


class OverlapChoice:
    """``setting``: "on" splits whatever there is to split, "off" nothing, "auto" where it has been seen to pay.

    ``num_trials`` counts trials.
    """

    def __init__(self, setting: Overlap) -> None:
        self._setting = setting
        self._loads: dict[int, _Load] = {}
        self._load: _Load | None = None
        self.num_trials = 0

    def is_split(self, sequences: int) -> bool:
        """Whether a step that finds so many sequences that decode is split."""
        if self._setting != "auto" or sequences < 1:
            self._turn_to(None)
            return self._setting == "on" and sequences > 1
        load = self._loads.setdefault(_size(sequences), _Load(_size(sequences)))
        self._turn_to(load)
        return load.is_split != (load.trial is not None)

    def observe(self, step: StepTimes) -> None:
        """What the step took for which ``is_split`` was asked."""
        load = self._load
        if load is None:
            return
        load.since_s += step.seconds
        if step.way != "other":
            load.long[step.way == "split"].add(step, _LONG)
        if step.way == "serial":
            rate = _COST_RATE if load.verify_s else 1.0
            load.draft_s += rate * (step.draft_s - load.draft_s)
            load.verify_s += rate * (step.verify_s - load.verify_s)
        if load.trial is not None:
            if step.way == ("serial" if load.is_split else "split"):
                load.trial.add(step, 1.0)
            load.left -= 1
            if load.left == 0:
                self._judge(load, load.trial)
        else:
            if step.way == ("split" if load.is_split else "serial"):
                load.recent.add(step, _RECENT)
            if self._is_due(load):
                load.trial, load.left, load.since_s = _Sum(), _TRIAL_STEPS, 0.0
                self.num_trials += 1

    def expected_gain(self, sequences: int) -> float:
        """Split over serial steps per second at best, by what serial steps took; 1 where nothing is known yet.

        Where half as many sequences have been served, their costs tell; else drafting and verifying half as many is
        taken to need half the time.
        """
        load = self._loads.get(_size(sequences))
        if sequences < 2 or load is None or not load.verify_s:
            return 1.0
        longer = max(load.draft_s, load.verify_s) / 2
        half = self._loads.get(_size(sequences // 2))
        if half is not None and half is not load:
            longer = max(longer, half.draft_s, half.verify_s)
        return (load.draft_s + load.verify_s) / (2 * longer)

    def _turn_to(self, load: _Load | None) -> None:
        """Another number of sequences ends a trial: it would compare what cannot be compared."""
        if self._load is not None and self._load is not load:
            self._load.trial = None
        self._load = load

    def _is_due(self, load: _Load) -> bool:
        if load.recent.steps < _FEWEST:
            return False
        if not load.is_split and math.log(self.expected_gain(load.size)) < _MARGIN:
            return False
        cost_s = _TRIAL_STEPS * load.recent.seconds / load.recent.steps
        return _TRIAL_SHARE * load.since_s >= cost_s * (1 + load.refuted)

    def _judge(self, load: _Load, trial: _Sum) -> None:
        load.trial = None
        if trial.steps < _FEWEST:
            return
        ratio = math.log(self._rate(load, trial, not load.is_split) / self._rate(load, load.recent, load.is_split))
        sample = -ratio if load.is_split else ratio
        load.trials += 1
        load.gain += max(1 / load.trials, 0.5) * (sample - load.gain)
        least = 0.0 if load.is_split else _MARGIN
        is_split = load.gain > least
        # A trial that speaks for a change is repeated soon.
        load.refuted = 0 if (sample > least) != load.is_split else min(load.refuted + 1, _REFUTED)
        if load.trials >= _TRIALS and is_split != load.is_split:
            load.is_split, load.recent = is_split, _Sum()

    def _rate(self, load: _Load, steps: _Sum, is_split: bool) -> float:
        """Tokens per second. A few steps tell what they take, but not how much they yield: that is a way's long mean,
        which begins as that of both."""
        both = load.long.values()
        mean = sum(way.tokens for way in both) / sum(way.parts for way in both)
        way = load.long[is_split]
        return steps.parts / steps.seconds * (_PRIOR * mean + way.tokens) / (_PRIOR + way.parts)


def _size(sequences: int) -> int:
    """Numbers of sequences that count as one: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, ..."""
    step = 1 << max(0, (sequences - 1).bit_length() - 2)
    return -(-sequences // step) * step
