"""What a drafted node is worth: the chance that it is accepted, learnt from what became of earlier ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eagle2.engine.isotonic import Floats, isotonic

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

# Upper edges of the bins of exp(score): finer where most drafted nodes lie.
EDGES = (0.001, 0.003, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 1.0)
_DEPTHS = 5  # depths with a map of their own; deeper nodes share the last
_PRIOR = 8.0  # nodes that a prior counts for
_HALF_LIFE = 256  # steps
_REFRESH = 8  # steps


class NodeValues:
    """A map from the draft's probability of a path to the measured share of such paths that are accepted.

    Measured in bins of exp(score), made rising (isotonic), straight between the means of the bins. There is one map for
    all depths, which begins as the draft's own word, and one for each depth, which begins as that one. Old outcomes
    fade by the step, so that the maps follow what is asked now.
    """

    def __init__(self) -> None:
        edges = np.array(EDGES)
        self._edges = edges[:-1]
        self._middles: Floats = (np.concatenate([[0.0], edges[:-1]]) + edges) / 2
        shape = (_DEPTHS, len(edges))
        self._counts, self._accepted, self._sums = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._steps = 0
        self._fit()

    def of(self, scores: Floats, depths: Integers, parents: Integers) -> Floats:
        """The chance (M,) of each node to be accepted, never above its parent's.

        scores (M,): natural logarithms of path probabilities. depths (M,): from 1 on, a child's one more than its
        parent's. parents (M,): among these nodes, -1 for children of a root.
        """
        drafted = np.exp(scores)
        values = np.zeros(len(scores))
        for depth in range(1, int(depths.max(initial=0)) + 1):
            mine = np.flatnonzero(depths == depth)
            place = min(depth, _DEPTHS) - 1
            chances = np.interp(drafted[mine], self._at[place], self._chances[place])
            values[mine] = chances if depth == 1 else np.minimum(chances, values[parents[mine]])
        return values

    def observe(self, scores: Floats, depths: Integers, accepted: Booleans) -> None:
        """What became of verified nodes (M,): all of them, those behind a rejected parent too, as rejected."""
        drafted = np.exp(scores)
        bins = (np.minimum(depths, _DEPTHS) - 1) * len(EDGES) + np.searchsorted(self._edges, drafted)
        size, shape = self._counts.size, self._counts.shape
        self._counts += np.bincount(bins, minlength=size).reshape(shape)
        self._accepted += np.bincount(bins, accepted, minlength=size).reshape(shape)
        self._sums += np.bincount(bins, drafted, minlength=size).reshape(shape)

    def step(self) -> None:
        """A step has passed."""
        self._steps += 1
        fading = 0.5 ** (1 / _HALF_LIFE)
        for array in (self._counts, self._accepted, self._sums):
            array *= fading
        if self._steps % _REFRESH == 0:
            self._fit()

    def table(self) -> list[tuple[float, float]]:
        """The map of all depths: a bin's upper edge, and the chance that its nodes are accepted."""
        return list(zip(EDGES, self._overall.tolist(), strict=True))

    def _fit(self) -> None:
        counts, accepted, sums = self._counts.sum(0), self._accepted.sum(0), self._sums.sum(0)
        means = (sums + _PRIOR * self._middles) / (counts + _PRIOR)
        self._overall = isotonic((accepted + _PRIOR * means) / (counts + _PRIOR), counts + _PRIOR)
        self._at, self._chances = [], []
        for own_counts, own_accepted, own_sums in zip(self._counts, self._accepted, self._sums, strict=True):
            weights = own_counts + _PRIOR
            chances = isotonic((own_accepted + _PRIOR * self._overall) / weights, weights)
            # Nothing is accepted that the draft holds for impossible.
            self._at.append(np.concatenate([[0.0], (own_sums + _PRIOR * means) / weights]))
            self._chances.append(np.concatenate([[0.0], chances]))
