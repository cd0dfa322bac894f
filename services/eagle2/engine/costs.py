"""What a step costs: seconds by the number of rows, measured at start-up and kept up to date by every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eagle2.engine.isotonic import Floats, isotonic

# A measurement moves the whole curve by a little (a machine that becomes slower does so for all sizes) and the sizes
# beside it by some more. One that is far off counts as one that is this far off: a machine that was elsewhere.
_LEVEL_RATE, _SHAPE_RATE = 0.05, 0.1
_FARTHEST = 0.4  # of log(measured / expected)
_SMALLEST = 1e-9  # seconds
_SWEEPS = 300  # over what was measured at start-up
_GUESSED = 0.01  # weight of a size that was never measured


# Tiles that lie so far apart, in rows, are steps of the curve rather than a slope.
_STEP = 8


def sizes_up_to(most: int, tiles: Sequence[int] = ()) -> tuple[int, ...]:
    """Sizes at which a curve is measured: 1, 2, 4, 8, 12, 16, 24, 32, 48, ... and ``most``.

    ``tiles``, ascending, are the row counts that a forward is padded to, where it is (``models/linear.py``). Where they
    lie apart each of them is a size, and nothing between them is: it costs what the next tile does.
    """
    steps = [1, 2, 4, 8]
    while steps[-1] < most:
        steps += [steps[-1] * 3 // 2, steps[-1] * 2]
    apart = {tile: before for before, tile in pairwise((0, *tiles)) if tile - before >= _STEP}

    def padded(size: int) -> int:
        return next((tile for tile, before in apart.items() if before < size <= tile), size)

    largest = padded(most)
    sizes = {padded(size) for size in steps if size < most} | {tile for tile in apart if tile < largest}
    return tuple(sorted({1, *sizes, largest}))


class CostCurve:
    """Seconds of a forward of so many rows: never falling, straight between the sizes that are measured.

    ``sizes`` ascend from 1 on; beyond the last one the curve goes on as it last rose, below the first it is level.
    ``tiles`` are row counts that a forward is padded to: behind each of them the curve jumps.
    guessed: ``seconds`` were not measured, and count for little beside sizes that are.
    """

    def __init__(
        self, sizes: Sequence[int], seconds: Sequence[float], *, guessed: bool = False, tiles: Sequence[int] = ()
    ) -> None:
        assert len(sizes) == len(seconds) > 0, "a size has its seconds"
        assert all(a < b for a, b in pairwise(sizes)), f"sizes ascend, not {list(sizes)}"
        self.sizes: Floats = np.asarray(sizes, np.float64)
        self._measured: Floats = np.maximum(np.asarray(seconds, np.float64), _SMALLEST)
        self._weights: Floats = np.full(len(sizes), _GUESSED if guessed else 1.0)
        self._add_jumps(tiles)
        self._seconds: Floats | None = None  # not known since the last change
        self._rise = 0.0

    def __call__(self, rows: Floats) -> Floats:
        """Seconds (...) for rows (...), which need not be whole."""
        seconds: Floats = np.interp(rows, self.sizes, self.seconds)
        beyond: Floats = self._rise * np.maximum(rows - self.sizes[-1], 0.0)
        return seconds + beyond

    def at(self, rows: float) -> float:
        return float(self(np.array([rows]))[0])

    @property
    def seconds(self) -> Floats:
        """The curve at its sizes."""
        if self._seconds is None:
            self._seconds = self._fit()
        return self._seconds

    def observe(self, rows: float, seconds: float) -> None:
        """A forward of so many rows took so long."""
        self.learn(rows, _residual(seconds, self.at(rows)))

    def learn(self, rows: float, residual: float) -> None:
        """A forward of so many rows took exp(residual) times as long as the curve says."""
        self.shift(_LEVEL_RATE * residual)
        self.bend(rows, _SHAPE_RATE * residual)

    def shift(self, log_factor: float) -> None:
        """All sizes take exp(log_factor) times as long."""
        self._measured *= np.exp(log_factor)
        self._seconds = None

    def bend(self, rows: float, log_factor: float) -> None:
        """The sizes on both sides of ``rows`` do, each by its nearness."""
        places = np.arange(len(self.sizes))
        nearness = np.maximum(0.0, 1.0 - np.abs(np.interp(rows, self.sizes, places) - places))
        self._measured *= np.exp(log_factor * nearness)
        self._weights = np.maximum(self._weights, nearness)
        self._seconds = None

    def _add_jumps(self, tiles: Sequence[int]) -> None:
        """A row more than a tile costs what the next tile does, less the rows that it lacks.

        Without these sizes the curve would rise slowly towards the next tile, and rows that are free be left unused.
        """
        sizes, seconds = self.sizes.tolist(), self._measured.tolist()
        if len(sizes) < 2:
            return
        slope = max((seconds[1] - seconds[0]) / (sizes[1] - sizes[0]), 0.0)
        taken = dict(zip(sizes, seconds, strict=True))
        for tile, following in pairwise(tiles):
            if following - tile >= _STEP and tile in taken and following in taken:
                behind = max(taken[following] - slope * (following - tile - 1), taken[tile])
                place = int(np.searchsorted(self.sizes, tile + 1))
                self.sizes = np.insert(self.sizes, place, tile + 1)
                self._measured = np.insert(self._measured, place, behind)
                self._weights = np.insert(self._weights, place, _GUESSED)

    def _fit(self) -> Floats:
        seconds = isotonic(self._measured, self._weights)
        # The last rise is that from half the largest size on: a single step of the curve is too noisy.
        last = self.sizes[-1]
        begin = float(np.interp(last / 2, self.sizes, seconds))
        self._rise = (seconds[-1] - begin) / (last - last / 2) if len(self.sizes) > 1 else 0.0
        return seconds


class StepCosts:
    """Seconds of a step of the target: ``curve`` by its rows, measured at a context of ``context`` positions, and for
    every position that a row sees beyond those ``position_s``.
    """

    def __init__(self, curve: CostCurve, context: float = 0.0, position_s: float = 0.0) -> None:
        self.curve, self.context, self.position_s = curve, context, position_s

    def __call__(self, rows: Floats, context: float) -> Floats:
        """Seconds (...) for rows (...) that see ``context`` positions in the mean."""
        beyond: Floats = self.position_s * rows * (context - self.context)
        # A context shorter than the measured one takes away no more than half.
        return np.maximum(self.curve(rows) + beyond, self.curve(rows) / 2)

    def at(self, rows: float, context: float) -> float:
        return float(self(np.array([rows]), context)[0])

    def observe(self, rows: float, context: float, seconds: float) -> None:
        """A step took so long."""
        self.curve.learn(rows, _residual(seconds, self.at(rows, context)))


@dataclass(frozen=True, slots=True)
class DraftCost:
    """How long trees took: ``new_rows`` head rows first, then ``depth`` - 1 levels of ``beam_rows`` rows each."""

    new_rows: int
    depth: int
    beam_rows: int
    seconds: float


class DraftCosts:
    """Seconds from the question for trees to the answer: the way there and back, the new rows, the levels.

    ``curve`` is that of one forward of the draft head, ``overhead_s`` what every question costs.
    """

    def __init__(self, curve: CostCurve, overhead_s: float = 1e-4) -> None:
        self.curve = curve
        self._overhead_s = overhead_s

    def __call__(self, new_rows: float, depth: Floats, beam_rows: Floats) -> Floats:
        """Seconds (...) for depths (...) and beam rows (...): the sum of all sequences' rows, a level."""
        return self._overhead_s + self.curve.at(new_rows) + (depth - 1) * self.curve(beam_rows)

    def at(self, new_rows: float, depth: int, beam_rows: float) -> float:
        return float(self(new_rows, np.array([float(depth)]), np.array([float(beam_rows)]))[0])

    def fit(self, measured: Iterable[DraftCost]) -> None:
        """Take over what was measured at start-up: the parts that make up the measured sums."""
        measured = list(measured)
        for _ in range(_SWEEPS):
            for cost in measured:
                self._learn(cost, 0.0, 0.8)

    def observe(self, cost: DraftCost) -> None:
        self._learn(cost, _LEVEL_RATE, _SHAPE_RATE)

    def _learn(self, cost: DraftCost, level_rate: float, shape_rate: float) -> None:
        extend = self.curve.at(cost.new_rows)
        levels = (cost.depth - 1) * self.curve.at(cost.beam_rows)
        expected = self._overhead_s + extend + levels
        residual = _residual(cost.seconds, expected)
        # Each part answers for its share of the time.
        self.curve.shift(level_rate * residual)
        self._overhead_s *= float(np.exp(residual * (level_rate + shape_rate * self._overhead_s / expected)))
        self.curve.bend(cost.new_rows, shape_rate * residual * extend / expected)
        if cost.depth > 1:
            self.curve.bend(cost.beam_rows, shape_rate * residual * levels / expected)


class OwnCosts:
    """Seconds of a step that are neither drafting nor the target's: questions put together, trees checked and cut.

    What a tree takes is what steps with trees take more than plain ones, by tree.
    """

    def __init__(self) -> None:
        self._plain_s, self._trees_s, self._num_trees = 0.0, 0.0, 0.0
        self._plain_steps, self._tree_steps = 0, 0

    @property
    def tree_s(self) -> float:
        return max(self._trees_s - self._plain_s, 0.0) / self._num_trees if self._num_trees else 0.0

    def observe(self, trees: int, seconds: float) -> None:
        """A step with so many trees took so long beside drafting and the target."""
        if not trees:
            self._plain_steps += 1
            self._plain_s += _rate(self._plain_steps) * (seconds - self._plain_s)
            return
        self._tree_steps += 1
        rate = _rate(self._tree_steps)
        self._trees_s += rate * (seconds - self._trees_s)
        self._num_trees += rate * (trees - self._num_trees)


def _rate(steps: int) -> float:
    """The mean at first, then a moving one."""
    return max(1.0 / steps, _LEVEL_RATE)


def _residual(measured: float, expected: float) -> float:
    difference = float(np.log(max(measured, _SMALLEST) / expected))
    return min(max(difference, -_FARTHEST), _FARTHEST)
