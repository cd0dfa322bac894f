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
    batch, _ = tree.tokens.shape
    device = tree.tokens.device
    bonus = torch.zeros(batch, dtype=torch.int64, device=device)
    walking = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    columns = [node]
    counts = torch.zeros_like(bonus)
    while walking.numel():
        picked = choose(walking, node)
        is_child = tree.parents[walking] == node.unsqueeze(1)
        match = is_child & (tree.tokens[walking] == picked.unsqueeze(1))
        found = match.any(dim=1)
        bonus[walking[~found]] = picked[~found]
        walking, node = walking[found], match[found].int().argmax(dim=1)
        if walking.numel():
            column = torch.full((batch,), NO_NODE, dtype=torch.int64, device=device)
            column[walking] = node
            columns.append(column)
            counts[walking] += 1
    return Acceptance(torch.stack(columns, dim=1), counts, bonus)


def greedy(argmax: Tensor) -> Choose:
    """Temperature 0. argmax: (B, N) int64, the target's best token at each node."""
    return lambda sequences, nodes: argmax[sequences, nodes]
