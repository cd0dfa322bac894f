"""Tree expansion and rerank (EAGLE-2, sections 4.1 and 4.2): what the drafter proposes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle2.speculative.tree import NO_NODE, Tree


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How large a tree may grow: levels below the root, children per node, nodes with the root.

    The paper's "60/6/10" is ``TreeShape(depth=6, top_k=10, num_nodes=60)``.
    """

    depth: int
    top_k: int
    num_nodes: int

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "num_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")


class DraftNetwork(Protocol):
    """The draft head with its cache up to date for B sequences, as expansion sees it."""

    def step(self, tokens: Tensor, features: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """One forward of K beam nodes a sequence.

        tokens: (B, K) int64. features: (B, K, H), the outputs of the parents' rows. ancestors: (B, K, A) int64,
        earlier beam rows of this expansion on the path to each node, oldest first; row r of level l has number
        l*K + r, level 1 being l = 0. Each node sees the context, its ancestors and itself.
        Returns the predicted features (B, K, H) and the logits (B, K, V).
        """
        ...


@dataclass(frozen=True, slots=True)
class Candidates:
    """All drafted nodes of an expansion in flat order: K of level 1, then a block of K*K a level.

    tokens (B, C) int64; parents (B, C) int64, flat index or -1 for the root; scores (B, C) float32.
    confidences (B, C) float32: each node's own log-probability, which its score adds to its parent's.
    beam (B, depth*K) int64: flat indices of each level's K best nodes, level by level, the best first.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    confidences: Tensor
    beam: Tensor


def best_children(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The ``top_k`` likeliest tokens at temperature 1: log-probabilities (..., K) float32 and ids (..., K)."""
    logits = logits.float()
    values, tokens = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    return values - logits.logsumexp(dim=-1, keepdim=True), tokens


def expand(
    network: DraftNetwork, features: Tensor, logits: Tensor, shape: TreeShape, *, by_value: bool = True
) -> Candidates:
    """Grow the candidates level by level; each level's beam is the K best nodes of the level above.

    features: (B, H) the head's output at the last committed row; logits: (B, V) there. A K above V counts as V.
    by_value: nodes compete for the beam by their score, the product of the confidences on their path; else by their
    own confidence alone (the paper's ablation).
    """
    scores, tokens = best_children(logits, shape.top_k)
    batch, k = tokens.shape
    levels_tokens, levels_scores, levels_confidences = [tokens], [scores], [scores]
    levels_parents = [torch.full_like(tokens, NO_NODE)]

    beam_tokens, beam_scores = tokens, scores
    beam_flat = torch.arange(k, device=tokens.device).expand(batch, k)
    levels_beam = [beam_flat]
    beam_features = features.unsqueeze(1).expand(batch, k, -1)
    ancestors = torch.empty(batch, k, 0, dtype=torch.int64, device=tokens.device)
    for level in range(1, shape.depth):
        outputs, logits = network.step(beam_tokens, beam_features, ancestors)
        log_probs, tokens = best_children(logits, k)
        scores = (beam_scores.unsqueeze(2) + log_probs).flatten(1)
        tokens, confidences = tokens.flatten(1), log_probs.flatten(1)
        levels_tokens.append(tokens)
        levels_scores.append(scores)
        levels_confidences.append(confidences)
        levels_parents.append(beam_flat.repeat_interleave(k, dim=1))

        # Ties go to the lower flat index; topk would break them arbitrarily.
        best = (scores if by_value else confidences).argsort(dim=1, descending=True, stable=True)[:, :k]
        parent_slot = best // k
        beam_tokens, beam_scores = tokens.gather(1, best), scores.gather(1, best)
        beam_flat = k + (level - 1) * k * k + best
        levels_beam.append(beam_flat)
        beam_features = outputs.gather(1, parent_slot.unsqueeze(2).expand(-1, -1, outputs.shape[2]))
        inherited = ancestors.gather(1, parent_slot.unsqueeze(2).expand(-1, -1, ancestors.shape[2]))
        ancestors = torch.cat([inherited, ((level - 1) * k + parent_slot).unsqueeze(2)], dim=2)

    levels = (levels_tokens, levels_parents, levels_scores, levels_confidences, levels_beam)
    return Candidates(*(torch.cat(level, 1) for level in levels))


def select(candidates: Candidates, num_draft_tokens: int) -> Tensor:
    """Rerank: flat indices (B, n) of the best candidates over all levels, ascending.

    Order is (score descending, flat index ascending), so a selected node's parent is always selected.
    Fewer candidates than asked for: all of them.
    """
    order = candidates.scores.argsort(dim=1, descending=True, stable=True)
    return order[:, :num_draft_tokens].sort(dim=1).values


def tree_of(candidates: Candidates, selected: Tensor, roots: Tensor) -> Tree:
    """The tree of the roots (B,) and the selected candidates (B, n): flat indices, ascending, parents among them."""
    batch, drafted = selected.shape
    node_of = torch.full(candidates.tokens.shape, NO_NODE, dtype=torch.int64, device=roots.device)
    node_of.scatter_(1, selected, torch.arange(1, drafted + 1, device=roots.device).expand(batch, drafted))
    flat_parents = candidates.parents.gather(1, selected)
    parents = torch.where(flat_parents < 0, 0, node_of.gather(1, flat_parents.clamp_min(0)))
    root = Tree.of_roots(roots)
    return Tree(
        tokens=torch.cat([root.tokens, candidates.tokens.gather(1, selected)], dim=1),
        parents=torch.cat([root.parents, parents], dim=1),
        scores=torch.cat([root.scores, candidates.scores.gather(1, selected)], dim=1),
        sizes=torch.full_like(roots, drafted + 1),
    )


def draft_trees(network: DraftNetwork, features: Tensor, logits: Tensor, roots: Tensor, shape: TreeShape) -> Tree:
    """Expand, then rerank. features (B, H) and logits (B, V) at the head's last row; roots (B,)."""
    if shape.num_nodes == 1:
        return Tree.of_roots(roots)
    candidates = expand(network, features, logits, shape)
    return tree_of(candidates, select(candidates, shape.num_nodes - 1), roots)


Policy = Callable[[DraftNetwork, Tensor, Tensor, Tensor, TreeShape], Tree]
"""How trees are drafted: called as ``draft_trees`` is, which is the one that serves."""
