"""Which of two ways of doing steps is the faster one: now and then the other is tried for a few steps, the better kept.

What a way takes is known to nobody beforehand: two sides may share cores, caches and an interpreter. So a few steps of
one way are compared with those of the other just before them, since a machine's speed changes from minute to minute.

Only numbers in, decisions out: whoever runs the steps passes the seconds in, so the same measurements give the same
decisions. What is decided changes speed alone, never a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_STEPS = 8  # of a trial
_FEWEST = 5  # steps that a trial, or what it is compared with, rests on
_REFUTED = 3  # trials in a row that speak for what is done make the next ones rarer, so many of them at most
_DEAREST = 4  # times as long, or as short, as the way in use: all that is believed of the other one
_REMEMBERED = 2  # trials whose mean counts: a machine, and what it is given, may change
_TRIAL_NOISE = 0.06  # standard deviation of the log of a trial's seconds, on a machine that has other work
_TRIALS = 2  # before anything is changed
_RECENT = 0.95  # what a step keeps of the weight of those before it


@dataclass(slots=True)
class _Sum:
    """Steps of one way: parts of steps (sequences), tokens and seconds, the old ones for less."""

    parts: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0
    squares: float = 0.0  # of the tokens of a step for a sequence, times sequences

    def add(self, sequences: int, tokens: float, seconds: float, keep: float) -> None:
        self.fade(keep)
        self.parts += sequences
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1
        self.squares += tokens * tokens / sequences

    @property
    def error(self) -> float:
        """Standard error of the log of the tokens that a step yields for a sequence, by how steps differ."""
        variance = max(self.squares - self.tokens * self.tokens / self.parts, 0.0) / self.steps
        return math.sqrt(variance * self.parts) / self.tokens

    def fade(self, keep: float) -> None:
        self.parts *= keep
        self.tokens *= keep
        self.seconds *= keep
        self.steps *= keep
        self.squares *= keep


@dataclass(slots=True)
class _Load:
    """What is known for about so many sequences. saving: log of the usual way's over the other one's seconds for a
    sequence's step, over the trials."""

    is_other: bool = False
    saving: float = 0.0
    trials: int = 0
    refuted: int = 0
    since_s: float = 0.0  # the last trial
    recent: _Sum = field(default_factory=_Sum)  # of the way that is in use
    long: dict[bool, _Sum] = field(default_factory=lambda: {False: _Sum(), True: _Sum()})  # by is_other
    trial: _Sum | None = None
    left: int = 0  # steps of the trial


class Trials:
    """Compares the usual way with another one, apart for every size of batch. ``num_trials`` counts trials.

    share: of the time goes into trials at most. margin: the other way must be this much faster (a ratio) before it is
    taken up. memory: steps over which the mean of what a way yields is taken. prior: parts of steps that the tokens of
    a way are taken to be those of both before they are seen. eager: trials that begin as soon as there is something to
    compare them with, whatever their share.
    """

    def __init__(self, *, share: float, margin: float, memory: int, prior: float = 0.0, eager: int = 0) -> None:
        self._share, self._margin, self._prior, self._eager = share, math.log(margin), prior, eager
        self._keep = 1.0 - 1.0 / memory
        self._loads: dict[int, _Load] = {}
        self._load: _Load | None = None
        self.num_trials = 0

    def is_other(self, sequences: int, *, starts_other: bool = False) -> bool:
        """Whether the step of so many sequences is done the other way. ``starts_other``: where nothing is known yet."""
        size = size_of(sequences)
        load = self._loads.setdefault(size, _Load())
        if not load.trials and load.trial is None:
            load.is_other = self._neighbour(size, starts_other)
        if self._load is not load:
            self.pause()
            self._load = load
        return load.is_other != (load.trial is not None)

    def _neighbour(self, size: int, otherwise: bool) -> bool:
        """What is better for the nearest size about which something was found, unless none is within a factor of 2."""
        judged = [
            known for known, load in self._loads.items() if load.trials >= _TRIALS and size <= 2 * known <= 4 * size
        ]
        if not judged:
            return otherwise
        return self._loads[min(judged, key=lambda known: (abs(known - size), known))].is_other

    def judged(self, sequences: int) -> bool | None:
        """What trials found for so many sequences: whether the other way is the better one; None before."""
        load = self._loads.get(size_of(sequences))
        return None if load is None or load.trials < _TRIALS else load.is_other

    def pause(self) -> None:
        """The next step has another number of sequences, or none. It ends a trial: it would compare what differs."""
        if self._load is not None:
            self._load.trial = None
        self._load = None

    def observe(self, way: bool | None, sequences: int, tokens: float, seconds: float, *, may_try: bool = True) -> None:
        """What the step took for which ``is_other`` was asked.

        way: whether it was done the other way; None where it tells nothing of either. may_try: whether the way that
        is not in use could pay at all.
        """
        load = self._load
        if load is None:
            return
        load.since_s += seconds
        if not sequences:
            way = None
        if way is not None:
            load.long[way].add(sequences, tokens, seconds, self._keep)
        if load.trial is not None:
            if way is not None and way != load.is_other:
                load.trial.add(sequences, tokens, seconds, 1.0)
            load.left -= 1
            if load.left == 0:
                self._judge(load, load.trial)
                self._choose(load)
        else:
            if way is load.is_other:
                load.recent.add(sequences, tokens, seconds, _RECENT)
                self._choose(load)
            if may_try and self._is_due(load):
                load.trial, load.left, load.since_s = _Sum(), _STEPS, 0.0
                # What the other way yielded before was of other text: it counts as much as this trial at most.
                other = load.long[not load.is_other]
                other.fade(min(1.0, _STEPS / max(other.steps, 1.0)))
                self.num_trials += 1

    def _is_due(self, load: _Load) -> bool:
        if load.recent.steps < _FEWEST:
            return False
        if load.trials < self._eager:
            return load.since_s >= _FEWEST * load.recent.seconds / load.recent.steps
        other = load.long[not load.is_other]
        cost_s = load.recent.seconds / load.recent.steps
        if other.steps:
            # Bounded: a way that took for ever once may have become another.
            cost_s = min(max(other.seconds / other.steps, cost_s), _DEAREST * cost_s)
        return self._share * load.since_s >= _STEPS * cost_s * (1 + load.refuted)

    def _judge(self, load: _Load, trial: _Sum) -> None:
        load.trial = None
        if trial.steps < _FEWEST:
            return
        ratio = math.log(trial.parts / trial.seconds * load.recent.seconds / load.recent.parts)
        ratio = min(max(ratio, -math.log(_DEAREST)), math.log(_DEAREST))
        sample = -ratio if load.is_other else ratio
        load.trials += 1
        load.saving += 1 / min(load.trials, _REMEMBERED) * (sample - load.saving)
        # A trial that speaks for a change is repeated soon.
        is_other = sample + self._yield(load) > self._least(load)
        load.refuted = 0 if is_other != load.is_other else min(load.refuted + 1, _REFUTED)

    def _choose(self, load: _Load) -> None:
        """Change the way where the other one is better by more than what may be noise. One that came to yield less is
        given up without a trial."""
        if load.trials < _TRIALS:
            return
        gain = load.saving + self._yield(load) - self._least(load)
        if (gain < 0) == load.is_other and abs(gain) > self._noise(load):
            load.is_other, load.recent = not load.is_other, _Sum()

    def _noise(self, load: _Load) -> float:
        """Standard error of the log of what is gained."""
        known = (way.parts / (way.parts + self._prior) * way.error for way in load.long.values())
        return math.hypot(_TRIAL_NOISE / math.sqrt(min(load.trials, _REMEMBERED)), *known)

    def _least(self, load: _Load) -> float:
        return 0.0 if load.is_other else self._margin

    def _yield(self, load: _Load) -> float:
        """Log of the other way's over the usual one's tokens for a sequence's step. A few steps tell what they take,
        but not how much they yield: that is a way's long mean, which begins as that of both."""
        both = load.long.values()
        mean = sum(way.tokens for way in both) / sum(way.parts for way in both)
        usual, other = (
            (self._prior * mean + way.tokens) / (self._prior + way.parts) for way in (load.long[False], load.long[True])
        )
        return math.log(other / usual)


def size_of(sequences: int) -> int:
    """Numbers of sequences that count as one: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, ..."""
    step = 1 << max(0, (sequences - 1).bit_length() - 2)
    return -(-sequences // step) * step
