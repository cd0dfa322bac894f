"""How many prompt tokens a step takes beside sequences that decode, so that their next tokens do not wait too long."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from eagle2.engine.isotonic import Floats

# Of the bound on the gap that a step plans to use: costs are estimates, and the machine has other work.
_AIM = 0.9
# What a step gives to prompts at least, also where decoding alone reaches the bound: so much of the time of decoding,
# since a prompt that hardly gets on is worse for all than text at two thirds of its speed; and so many tokens.
_LEAST_SHARE = 0.5
_LEAST = 16
# A context of so many tokens doubles the cost of a row, while nothing better is known.
_GUESSED_CONTEXT = 1000
# Variances of logarithms: of a measured step, of a first guess, and of what the machine changes by from step to step.
_NOISE, _UNKNOWN, _DRIFT = 0.05, 1.0, 0.005
_FARTHEST = 0.7  # log(measured / expected) that is believed
_SMALLEST = 1e-9  # seconds

Span = tuple[int, int]
"""(start, count): ``count`` prompt tokens from position ``start`` on."""


@dataclass(slots=True)
class PromptCost:
    """Seconds for prompt tokens: ``row_s`` for each, and ``pair_s`` for each token that each attends to."""

    row_s: float
    pair_s: float

    def __call__(self, start: int, count: int) -> float:
        return self.row_s * count + self.pair_s * _pairs(start, count)

    def fit(self, start: int, seconds: float) -> int:
        """The most tokens from position ``start`` on that take at most so many seconds."""
        if seconds <= 0:
            return 0
        # The root of pair_s / 2 n^2 + linear n - seconds, written so that it also holds for pair_s = 0.
        linear = self.row_s + self.pair_s * (start + 0.5)
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 2 * self.pair_s * seconds)))


@dataclass(slots=True)
class Allowance:
    """What a step may still take of prompts: ``tokens``, and of ``seconds`` what ``cost`` says; None is no bound.

    ``rows`` are those that the step has already. ``least`` tokens are had whatever they cost.
    """

    tokens: int
    seconds: float | None = None
    cost: PromptCost | None = None
    rows: int = 0
    least: int = _LEAST

    def fit(self, start: int, wanted: int) -> int:
        """How many of ``wanted`` tokens from position ``start`` on can be had."""
        most = max(0, min(wanted, self.tokens))
        if self.seconds is None:
            return most
        count = min(most, self.cost.fit(start, self.seconds) if self.cost is not None else 0)
        if count < wanted:
            count -= (self.rows + count) % _row_step(self.rows + count)
        return max(count, min(most, self.least))

    def take(self, start: int, count: int) -> None:
        self.tokens -= count
        self.rows += count
        self.least = max(0, self.least - count)
        if self.seconds is not None and self.cost is not None:
            self.seconds -= self.cost(start, count)


class PromptPace:
    """Learns what decoding and prompt tokens cost from the steps that were run; gives every step its allowance.

    chunk: tokens that a step takes at most, and does when nobody decodes. max_gap_s: seconds that a step should last at
    most while sequences decode; None for no bound.

    Three costs are estimated: of decoding, of a prompt token, and of a token's look at an earlier one. A step tells of
    their sum alone, so this is a Kalman filter of their logarithms: it moves most what is known least and weighs most.
    """

    def __init__(self, chunk: int, max_gap_s: float | None) -> None:
        self._chunk, self._max_gap_s = chunk, max_gap_s
        self._costs: Floats = np.zeros(3)  # seconds: decode, row, pair; 0 before anything was measured
        self._variance: Floats = _UNKNOWN * np.eye(3)

    @property
    def decode_s(self) -> float | None:
        """Seconds of a step without prompts; None before anything was measured."""
        return float(self._costs[0]) or None

    @property
    def cost(self) -> PromptCost | None:
        """Seconds of prompt tokens; None before anything was measured."""
        return PromptCost(float(self._costs[1]), float(self._costs[2])) if self._costs[1] else None

    def seconds(self, spans: Iterable[Span]) -> float:
        """What prompt tokens take beside sequences that decode; infinite before anything was measured."""
        spans = list(spans)
        if self.cost is None:
            return math.inf if spans else 0.0
        return sum(self.cost(start, count) for start, count in spans)

    def allowance(self, decoding_rows: int, turns: int = 1) -> Allowance:
        """What a step may take of prompts that verifies so many rows of sequences that decode. ``turns``: steps from
        one of a sequence to its next; each of them is to last that part of the bound."""
        if not decoding_rows or self._max_gap_s is None:
            return Allowance(self._chunk)
        left = _AIM * self._max_gap_s / turns - self._costs[0]
        seconds = max(float(left), _LEAST_SHARE * self._costs[0]) if self._costs[0] else 0.0
        return Allowance(self._chunk, seconds, self.cost, decoding_rows)

    def observe(self, seconds: float, spans: Iterable[Span], *, is_decoding: bool) -> None:
        """A step took so long, for prompt tokens ``spans`` and, when ``is_decoding``, sequences that decode."""
        counts = np.array([float(is_decoding), 0.0, 0.0])
        for start, count in spans:
            counts += (0.0, count, _pairs(start, count))
        if not counts.any():
            return
        seconds = max(seconds, _SMALLEST)
        self._guess(seconds, counts)
        parts = self._costs * counts
        expected = float(parts.sum())
        residual = min(max(math.log(seconds / expected), -_FARTHEST), _FARTHEST)
        shares = parts / expected
        doubt = self._variance @ shares
        gain = doubt / (shares @ doubt + _NOISE)
        self._costs = np.maximum(self._costs * np.exp(gain * residual), _SMALLEST * 1e-6 * (self._costs > 0))
        # What changes is what was looked at: nothing becomes doubtful because it was not seen for long.
        self._variance += _DRIFT * np.outer(shares, shares) - np.outer(gain, doubt)

    def _guess(self, seconds: float, counts: Floats) -> None:
        """First values for what was never seen, of what this step took beyond what is known."""
        new = (counts > 0) & (self._costs == 0)
        if not new.any():
            return
        rest = max(seconds - float(self._costs @ counts), seconds / 4)
        rows = counts[1] + counts[2] / _GUESSED_CONTEXT
        if new[1]:
            self._costs[1] = (rest / 2 if new[0] else rest) / rows
            self._costs[2] = self._costs[1] / _GUESSED_CONTEXT
        if new[0]:
            self._costs[0] = rest / 2 if new[1] else rest


def _row_step(rows: int) -> int:
    """Steps of so many rows, or some more, are padded to a multiple of this: 16, from 129 on 32, so that both ways of
    the CPU's products are suited (models/products.py, models/linear.py). Padding costs as much as a prompt token."""
    return 16 if rows <= 128 else 32


def _pairs(start: int, count: int) -> float:
    """Pairs of a token and one that it attends to, itself included."""
    return count * start + count * (count + 1) / 2
