"""EAGLE-2 without one of its two ideas, as in the ablation study of the paper: for measuring only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle2.speculative.draft import Candidates, DraftNetwork, TreeShape, expand, select, tree_of
from eagle2.speculative.tree import Tree


@dataclass(frozen=True, slots=True)
class Ablation:
    """A ``Policy``: ``draft_trees`` without what is switched off.

    value: nodes compete by the product of the confidences on their path. Without it by their own confidence alone;
    in the rerank none of them stands above its parent, so that what is kept is a tree.
    rerank: the best nodes of all levels are kept. Without it the beams themselves are, level by level from the top, the
    best first: at most ``depth * top_k`` nodes, of the last level as many as still fit.
    """

    value: bool = True
    rerank: bool = True

    def __call__(
        self, network: DraftNetwork, features: Tensor, logits: Tensor, roots: Tensor, shape: TreeShape
    ) -> Tree:
        if shape.num_nodes == 1:
            return Tree.of_roots(roots)
        candidates = expand(network, features, logits, shape, by_value=self.value)
        return tree_of(candidates, self._selected(candidates, shape.num_nodes - 1), roots)

    def _selected(self, candidates: Candidates, num_draft_tokens: int) -> Tensor:
        """Flat indices (B, n), ascending, parents always among them."""
        if not self.rerank:
            # A level's parents are all in the level above, which is taken whole before it.
            return candidates.beam[:, :num_draft_tokens].sort(dim=1).values
        if self.value:
            return select(candidates, num_draft_tokens)
        order = least_on_path(candidates).argsort(dim=1, descending=True, stable=True)
        return order[:, :num_draft_tokens].sort(dim=1).values


def least_on_path(candidates: Candidates) -> Tensor:
    """(B, C) float32: the least confidence (log-probability) of each node and its ancestors."""
    least, above = candidates.confidences, candidates.parents
    while bool((above >= 0).any()):
        at = above.clamp_min(0)
        least = torch.where(above >= 0, torch.minimum(least, candidates.confidences.gather(1, at)), least)
        above = torch.where(above >= 0, candidates.parents.gather(1, at), above)
    return least
