"""Static draft trees (EAGLE-1, section 4.2): the same places in every cycle, whatever the draft head is sure of."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from eagle2.speculative.draft import DraftNetwork, TreeShape, best_children
from eagle2.speculative.tree import Tree

RankPath = tuple[int, ...]
"""A place below the root: the rank of the child that is taken at each level, 0 being the likeliest."""

Rates = tuple[tuple[float, ...], ...]
"""``rates[d][r]``: how often the target's token is the child of rank r of an accepted node at depth d (root: 0)."""


def best_static_paths(rates: Rates, shape: TreeShape) -> tuple[RankPath, ...]:
    """The ``shape.num_nodes - 1`` places that are accepted most often, were every cycle like the average one.

    A place's worth is the product of the rates on its path; places are taken by worth, parents first, which makes
    the expected acceptance the longest that a tree of that size can have under these rates. A node has at most
    ``top_k`` children and a level at most ``top_k`` nodes that have some, as in EAGLE-2's expansion. Depths beyond
    the rates go by the last one.
    """
    taken: list[RankPath] = []
    parents: defaultdict[int, set[RankPath]] = defaultdict(set)  # by level, those with children
    open_places: list[tuple[float, int, RankPath]]
    open_places = [(-rate, 1, (rank,)) for rank, rate in enumerate(rates[0][: shape.top_k])]
    heapq.heapify(open_places)
    while open_places and len(taken) < shape.num_nodes - 1:
        worth, depth, path = heapq.heappop(open_places)
        above = parents[depth - 1]
        if path[:-1] not in above and len(above) >= shape.top_k:
            continue
        above.add(path[:-1])
        taken.append(path)
        if depth < shape.depth:
            for rank, rate in enumerate(rates[min(depth, len(rates) - 1)][: shape.top_k]):
                heapq.heappush(open_places, (worth * rate, depth + 1, (*path, rank)))
    return tuple(taken)


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes of a level: ``rows`` (n,) say below which beam row of the level above, ``ranks`` (n,) which child.

    ``beam`` (W,) are those that get children, as indices into the level, padded with its first; ``ancestors`` (W, l)
    their ancestors' rows as ``DraftNetwork.step`` counts them. ``parents`` (n,) are node indices of the tree.
    """

    rows: Tensor
    ranks: Tensor
    parents: Tensor
    beam: Tensor
    ancestors: Tensor


class StaticTree:
    """A ``Policy`` that drafts the given places in every cycle."""

    def __init__(self, paths: Sequence[RankPath]) -> None:
        """Raises ``ValueError`` for a place whose parent is missing, or one that is named twice."""
        self.paths = tuple(sorted(paths, key=lambda path: (len(path), path)))
        known = {(): 0} | {path: i for i, path in enumerate(self.paths, start=1)}
        if len(known) != len(paths) + 1:
            raise ValueError(f"a static tree names each place once, and never the root, got {list(paths)}")
        for path in self.paths:
            if path[:-1] not in known:
                raise ValueError(f"the place {path} has no parent in this static tree")
        self._fan_out = 1 + max((path[-1] for path in self.paths), default=0)
        self._levels = _levels(self.paths, known)
        self._width = max((len(level.beam) for level in self._levels), default=1)

    def __call__(
        self, network: DraftNetwork, features: Tensor, logits: Tensor, roots: Tensor, shape: TreeShape
    ) -> Tree:
        """Trees as ``draft_trees`` makes them. ``shape`` says what the network has room for."""
        assert len(self._levels) <= shape.depth, f"{len(self._levels)} levels do not fit {shape}"
        assert self._width <= shape.top_k, f"a beam of {self._width} does not fit {shape}"
        tree = Tree.of_roots(roots)
        tokens, parents, scores = [tree.tokens], [tree.parents], [tree.scores]
        batch, device = len(roots), roots.device
        outputs = features.unsqueeze(1)
        beam_scores = tree.scores
        log_probs, children = best_children(logits.unsqueeze(1), self._fan_out)
        for level in self._levels:
            rows, ranks = level.rows.to(device), level.ranks.to(device)
            tokens.append(children[:, rows, ranks])
            scores.append(beam_scores[:, rows] + log_probs[:, rows, ranks])
            parents.append(level.parents.to(device).expand(batch, -1))
            if level is self._levels[-1]:
                break
            beam = level.beam.to(device)
            beam_scores = scores[-1][:, beam]
            ancestors = level.ancestors.to(device).expand(batch, -1, -1)
            outputs, logits = network.step(tokens[-1][:, beam], outputs[:, rows[beam]], ancestors)
            log_probs, children = best_children(logits, self._fan_out)
        sizes = torch.full_like(roots, len(self.paths) + 1)
        return Tree(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), sizes)


def _levels(paths: Sequence[RankPath], node_of: dict[RankPath, int]) -> list[_Level]:
    with_children = {path[:-1] for path in paths}
    by_level: defaultdict[int, list[RankPath]] = defaultdict(list)
    for path in paths:
        by_level[len(path)].append(path)
    beams = {depth: [path for path in level if path in with_children] for depth, level in by_level.items()}
    # Rows of all levels are counted with one width.
    width = max((len(beam) for beam in beams.values()), default=1)
    row_of: dict[RankPath, int] = {(): 0}
    levels = []
    for depth, level in sorted(by_level.items()):
        beam = beams[depth]
        row_of |= {path: row for row, path in enumerate(beam)}
        padded = beam + beam[:1] * (width - len(beam)) if beam else []
        above = [[(d - 1) * width + row_of[path[:d]] for d in range(1, depth)] for path in padded]
        levels.append(
            _Level(
                rows=torch.tensor([row_of[path[:-1]] for path in level]),
                ranks=torch.tensor([path[-1] for path in level]),
                parents=torch.tensor([node_of[path[:-1]] for path in level]),
                beam=torch.tensor([level.index(path) for path in padded], dtype=torch.int64),
                ancestors=torch.tensor(above, dtype=torch.int64).view(len(padded), depth - 1),
            )
        )
    return levels


@dataclass(frozen=True, slots=True)
class Eagle1:
    """A ``Policy``: the best static tree of each shape under these rates."""

    rates: Rates

    def __call__(
        self, network: DraftNetwork, features: Tensor, logits: Tensor, roots: Tensor, shape: TreeShape
    ) -> Tree:
        if shape.num_nodes == 1:
            return Tree.of_roots(roots)
        fitting = replace(shape, top_k=min(shape.top_k, logits.shape[-1]))
        return _best_static_tree(self.rates, fitting)(network, features, logits, roots, shape)


@lru_cache(maxsize=32)
def _best_static_tree(rates: Rates, shape: TreeShape) -> StaticTree:
    return StaticTree(best_static_paths(rates, shape))
