"""Trees between the pair's messages and the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eagle2.engine.budget import DraftedNodes
from eagle2.engine.isotonic import Floats
from eagle2.engine.values import Booleans, Integers
from eagle2.kv_cache.slots import Slots
from eagle2.speculative.tree import NO_NODE, Tree
from eagle2.transport.messages import DraftTree


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees on the host, one after another: M nodes of B trees in flat arrays, each tree's root before its other nodes.

    A tree has some ten nodes, and an operation on ten numbers takes as long as one on those of all trees of a step.

    tokens:  (M,) int64, token ids.
    parents: (M,) int64, the parent's place in its own tree, before the node's; -1 for a root.
    scores:  (M,) float64, natural-log probability of the path under the draft; root 0.
    depths:  (M,) int64, edges from the root.
    sizes:   B numbers, nodes of each tree, root included.
    """

    tokens: Integers
    parents: Integers
    scores: Floats
    depths: Integers
    sizes: Sequence[int]

    @staticmethod
    def of_roots(roots: Sequence[int]) -> Forest:
        """Trees of the root alone: plain decoding."""
        zeros = np.zeros(len(roots), np.int64)
        return Forest(np.array(roots, np.int64), zeros + NO_NODE, zeros.astype(np.float64), zeros, [1] * len(roots))

    @staticmethod
    def joined(parts: Sequence[Forest]) -> Forest:
        """The trees of all ``parts``, at least one, in order."""
        return Forest(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.parents for part in parts]),
            np.concatenate([part.scores for part in parts]),
            np.concatenate([part.depths for part in parts]),
            [size for part in parts for size in part.sizes],
        )

    def split(self) -> list[Forest]:
        """Each tree by itself."""
        parts, end = [], 0
        for size in self.sizes:
            mine = slice(end, end := end + size)
            parts.append(Forest(self.tokens[mine], self.parents[mine], self.scores[mine], self.depths[mine], (size,)))
        return parts

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def starts(self) -> Integers:
        """(B,): where each tree's root is."""
        return np.flatnonzero(self.depths == 0)

    def roots(self) -> Forest:
        """The roots alone."""
        return self.with_nodes(np.zeros(self.num_nodes - len(self.sizes), np.bool_))

    def drafted(self) -> DraftedNodes:
        """All nodes but the roots."""
        is_drafted = self.depths > 0
        trees = np.repeat(np.arange(len(self.sizes)), self.sizes)
        # Roots are left out: a tree's nodes move up by those of the trees before it and by its own.
        above = self._above() - trees - 1
        parents = np.where(self.parents == 0, -1, above)
        return DraftedNodes(self.scores[is_drafted], self.depths[is_drafted], parents[is_drafted], trees[is_drafted])

    def with_nodes(self, kept: Booleans) -> Forest:
        """The trees of all roots and those drafted nodes (M - B,) that are kept, a kept node's parent among them."""
        if kept.all():
            return self
        is_kept = self.depths == 0
        is_kept[~is_kept] = kept
        kept_before = np.cumsum(is_kept) - 1
        starts = self.starts
        sizes = np.add.reduceat(is_kept, starts, dtype=np.int64)
        above = self._above()[is_kept]
        own_start = np.repeat(kept_before[starts], sizes)
        is_root = above < 0
        assert is_kept[above[~is_root]].all(), "a kept node's parent is kept"
        return Forest(
            self.tokens[is_kept],
            np.where(is_root, NO_NODE, kept_before[above] - own_start),
            self.scores[is_kept],
            self.depths[is_kept],
            sizes.tolist(),
        )

    def paths(self, slots: Slots) -> Slots:
        """(M, D + 1) int32: of ``slots`` (M,) those of the nodes from the root to each node, padded with -1."""
        deepest = int(self.depths.max(initial=0))
        paths = np.full((self.num_nodes, deepest + 1), -1, np.int32)
        paths[np.arange(self.num_nodes), self.depths] = slots
        above = self._above()
        for depth in range(1, deepest + 1):
            mine = np.flatnonzero(self.depths == depth)
            paths[mine, :depth] = paths[above[mine], :depth]
        return paths

    def padded(self) -> Tree:
        """As the algorithm has them: (B, N), padded to the largest tree."""
        sizes = np.array(self.sizes, np.int64)
        is_node = np.arange(sizes.max(initial=0)) < sizes[:, None]

        def placed(values: np.ndarray, padding: float, dtype: type) -> torch.Tensor:
            array: np.ndarray = np.full(is_node.shape, padding, dtype)
            array[is_node] = values
            return torch.from_numpy(array)

        return Tree(
            placed(self.tokens, 0, np.int64),
            placed(self.parents, NO_NODE, np.int64),
            placed(self.scores, -np.inf, np.float32),
            torch.from_numpy(sizes),
        )

    def _above(self) -> Integers:
        """(M,): each node's parent among all nodes, -1 for a root."""
        return np.where(self.parents < 0, NO_NODE, self.parents + np.repeat(self.starts, self.sizes))


def forest_of(roots: Sequence[int], replies: Sequence[DraftTree | None], vocab_size: int) -> tuple[Forest, int]:
    """The trees that a proposer sent, each under its root; the root alone where it sent none, or what is no tree over
    this vocabulary. Also how many were of that last kind.

    A proposer may be of another build, or broken: nothing that it says is taken for granted.
    """
    none = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    usable, parts, num_wrong = list(replies), [], 0
    for place, reply in enumerate(replies):
        arrays = none if reply is None else (reply.tokens.numpy(), reply.parents.numpy(), reply.scores.numpy())
        if not len(arrays[0]) == len(arrays[1]) == len(arrays[2]):
            usable[place], arrays, num_wrong = None, none, num_wrong + 1
        parts.append(arrays)
    sizes = np.array([len(tokens) + 1 for tokens, _, _ in parts])
    if sizes.sum() == len(sizes):
        return Forest.of_roots(roots), num_wrong
    starts = np.cumsum(sizes) - sizes
    is_drafted = np.ones(sizes.sum(), np.bool_)
    is_drafted[starts] = False

    def filled(root: int | Sequence[int], dtype: type, place: int) -> np.ndarray:
        array: np.ndarray = np.empty(len(is_drafted), dtype)
        array[starts] = root
        array[is_drafted] = np.concatenate([arrays[place] for arrays in parts])
        return array

    tokens, parents = filled(roots, np.int64, 0), filled(NO_NODE, np.int64, 1)
    scores = filled(0, np.float64, 2)
    begins = np.repeat(starts, sizes)
    places = np.arange(len(tokens))
    is_placed = (tokens >= 0) & (tokens < vocab_size) & (parents >= 0) & (parents < places - begins)
    above = np.where(is_placed, parents + begins, places)
    is_wrong = is_drafted & ~(is_placed & (scores <= scores[above]))
    if is_wrong.any():
        wrong = np.logical_or.reduceat(is_wrong, starts).tolist()
        right = [None if of_tree else reply for of_tree, reply in zip(wrong, usable, strict=True)]
        return forest_of(roots, right, vocab_size)[0], num_wrong + sum(wrong)
    return Forest(tokens, parents, scores, _depths(np.where(is_drafted, above, NO_NODE)), sizes.tolist()), num_wrong


def _depths(above: Integers) -> Integers:
    """Edges from the root (M,) by each node's parent (M,), -1 for a root."""
    depths = np.zeros_like(above)
    at = above
    while (is_below := at >= 0).any():
        depths += is_below
        at = np.where(is_below, above[at], NO_NODE)
    return depths
