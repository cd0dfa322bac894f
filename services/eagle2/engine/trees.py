"""Trees between the pair's messages and the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from eagle2.engine.budget import DraftedNodes
from eagle2.engine.values import Booleans
from eagle2.speculative.tree import NO_NODE, Tree
from eagle2.transport.messages import DraftTree


def tree_of_reply(root: int, reply: DraftTree, vocab_size: int) -> Tree | None:
    """The tree (B = 1) under ``root`` that a proposer sent; None when it is no tree over this vocabulary.

    A proposer may be of another build, or broken: nothing that it says is taken for granted.
    """
    # Lists: a tree has some ten nodes, and every operation on a tensor takes longer than a look at all of them.
    tokens = [root, *reply.tokens.tolist()]
    parents = [NO_NODE, *reply.parents.tolist()]
    scores = [0.0, *reply.scores.tolist()]
    if not len(tokens) == len(parents) == len(scores):
        return None
    for node in range(1, len(tokens)):
        is_placed = 0 <= tokens[node] < vocab_size and 0 <= parents[node] < node
        if not is_placed or not scores[node] <= scores[parents[node]]:
            return None
    return Tree(
        tokens=torch.tensor([tokens]),
        parents=torch.tensor([parents]),
        scores=torch.tensor([scores], dtype=torch.float32),
        sizes=torch.tensor([len(tokens)]),
    )


def batched(trees: Sequence[Tree]) -> Tree:
    """Trees of one sequence each, padded to the largest, as one batch."""
    nodes = max(tree.num_nodes for tree in trees)

    def stacked(name: str, padding: float) -> torch.Tensor:
        rows = [getattr(tree, name) for tree in trees]
        return torch.cat([F.pad(row, (0, nodes - row.shape[1]), value=padding) for row in rows])

    return Tree(
        tokens=stacked("tokens", 0),
        parents=stacked("parents", NO_NODE),
        scores=stacked("scores", -torch.inf),
        sizes=torch.cat([tree.sizes for tree in trees]),
    )


def drafted_nodes(trees: Sequence[Tree]) -> DraftedNodes:
    """The drafted nodes of trees of one sequence each."""
    scores, depths, parents, places = [], [], [], []
    offset = 0
    for place, tree in enumerate(trees):
        above = tree.parents[0, 1:].numpy()
        scores.append(tree.scores[0, 1:].double().numpy())
        depths.append(tree.depths()[0, 1:].numpy())
        parents.append(np.where(above == 0, -1, above - 1 + offset))
        places.append(np.full(len(above), place))
        offset += len(above)
    return DraftedNodes(*(np.concatenate(parts) for parts in (scores, depths, parents, places)))


def with_nodes(tree: Tree, kept: Booleans) -> Tree:
    """The tree (B = 1) of the root and those drafted nodes (N - 1,) that are kept, a kept node's parent among them."""
    if bool(kept.all()):
        return tree
    nodes = np.concatenate([[0], np.flatnonzero(kept) + 1])
    moved = np.full(tree.num_nodes, NO_NODE, np.int64)
    moved[nodes] = np.arange(len(nodes))
    parents = tree.parents[0].numpy()[nodes]
    parents[1:] = moved[parents[1:]]
    assert bool((parents[1:] >= 0).all()), "a kept node's parent is kept"
    at = torch.from_numpy(nodes)
    return Tree(
        tree.tokens[:, at], torch.from_numpy(parents)[None], tree.scores[:, at], torch.full_like(tree.sizes, len(nodes))
    )
