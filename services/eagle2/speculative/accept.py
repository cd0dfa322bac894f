"""Acceptance: the target picks its token at each node; walk down while a child carries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle2.speculative.tree import NO_NODE, Tree

Choose = Callable[[Tensor, Tensor], Tensor]
"""(sequences (A,), nodes (A,)) int64 -> the target's token (A,) int64 at each; called once a level, from the root
down, for the sequences that still walk. Greedy and sampling differ only here."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a cycle commits: per sequence the accepted path and the target's own next token.

    path:   (B, P) int64, nodes from the root to the last accepted one, padded with -1; the root is always there.
    counts: (B,) int64, accepted drafted tokens (the root is not one).
    bonus:  (B,) int64, the target's token after the path: the next root.
    """

    path: Tensor
    counts: Tensor
    bonus: Tensor

    def committed_tokens(self, tree: Tree, sequence: int) -> list[int]:
        """Tokens that the cycle adds to the sequence's text: accepted ones, then the bonus."""
        accepted = self.path[sequence, 1 : int(self.counts[sequence]) + 1]
        return [*tree.tokens[sequence, accepted].tolist(), int(self.bonus[sequence])]


def accept(tree: Tree, choose: Choose) -> Acceptance:
    """Walk all B trees down in step.

    Lossless for any ``choose``: a token comes out only if the target picked it at that node. With Gumbel noise in
    ``choose`` this is the paper's sequential rule for point-mass drafts: child x is taken with probability p(x).
    """
    device = tree.tokens.device
    # Lists: a walk takes a few looks at ten numbers, each of which would take longer as an operation on a tensor.
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    paths, bonus = [[0] for _ in tokens], [0] * len(tokens)
    walking = list(range(len(tokens)))
    while walking:
        nodes = [paths[b][-1] for b in walking]
        picked = choose(torch.tensor(walking, device=device), torch.tensor(nodes, device=device)).tolist()
        onward = []
        for b, node, token in zip(walking, nodes, picked, strict=True):
            child = _child(tokens[b], parents[b], node, token)
            if child == NO_NODE:
                bonus[b] = token
            else:
                paths[b].append(child)
                onward.append(b)
        walking = onward
    longest = max(map(len, paths), default=1)
    padded = [path + [NO_NODE] * (longest - len(path)) for path in paths]
    return Acceptance(
        path=torch.tensor(padded, dtype=torch.int64, device=device).view(len(paths), longest),
        counts=torch.tensor([len(path) - 1 for path in paths], dtype=torch.int64, device=device),
        bonus=torch.tensor(bonus, dtype=torch.int64, device=device),
    )


def _child(tokens: list[int], parents: list[int], node: int, token: int) -> int:
    """The first child of ``node`` that carries ``token``; -1 when none does. Children stand behind their parent."""
    at = node
    while token in tokens[at + 1 :]:
        at = tokens.index(token, at + 1)
        if parents[at] == node:
            return at
    return NO_NODE


def greedy(argmax: Tensor) -> Choose:
    """Temperature 0. argmax: (B, N) int64, the target's best token at each node."""
    return lambda sequences, nodes: argmax[sequences, nodes]
