"""How often the target's token is the draft's first choice, its second, and so on: what a static tree is placed by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from eagle2.speculative.draft import TreeShape
from eagle2.speculative.static import RankPath, Rates, StaticTree, best_static_paths
from eagle2.transport.messages import DraftTree

# Nodes of the probing tree that have all their children: the places that are reached most.
_PROBED = 16
# As many visits as this count at the average of all depths, so that a depth that was hardly reached is not believed.
_PRIOR_VISITS = 20.0
# By these rates the places that are probed are chosen: wide at the top, and one path down to the sixth level.
_GUESSED: Rates = (tuple(0.6 * 0.4**rank for rank in range(32)),)


def probing_tree(depth: int, top_k: int) -> StaticTree:
    """A static tree whose inner nodes have ``top_k`` children each: the rank of whatever the target takes is seen."""
    inner: list[RankPath] = [()]
    for path in best_static_paths(_GUESSED, TreeShape(depth, top_k, 10 * _PROBED)):
        beside = [other for other in inner if len(other) == len(path)]
        if len(path) < depth and len(inner) < _PROBED and len(beside) < top_k and path[:-1] in inner:
            inner.append(path)
    return StaticTree([(*path, rank) for path in inner for rank in range(top_k)])


class RankCounter:
    """Counts, on probing trees, which child of each accepted node the target took."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._visits: defaultdict[int, int] = defaultdict(int)
        self._hits: defaultdict[int, list[int]] = defaultdict(lambda: [0] * top_k)

    def watch(self, tree: DraftTree, coming: Sequence[int], path: Sequence[int]) -> None:
        """A ``foresight.Watch``. Siblings stand in the order of their ranks."""
        children: defaultdict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(tree.parents.tolist(), start=1):
            children[parent].append(node)
        # Where the answer ends, what the target would have taken next is not known.
        for depth, node in enumerate(path[: len(coming)]):
            if len(children[node]) < self._top_k:
                return
            self._visits[depth] += 1
            if depth + 1 < len(path):
                self._hits[depth][children[node].index(path[depth + 1])] += 1

    @property
    def visits(self) -> list[int]:
        return [self._visits[depth] for depth in range(max(self._visits, default=-1) + 1)]

    def rates(self) -> Rates:
        """By depth and rank; a depth that was seldom reached is drawn towards the average of all."""
        visits = self.visits or [0]
        total = sum(visits)
        average = [sum(self._hits[d][r] for d in range(len(visits))) / max(total, 1) for r in range(self._top_k)]
        return tuple(
            tuple(
                (self._hits[depth][rank] + _PRIOR_VISITS * average[rank]) / (count + _PRIOR_VISITS)
                for rank in range(self._top_k)
            )
            for depth, count in enumerate(visits)
        )
