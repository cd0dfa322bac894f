"""One EAGLE-2 cycle, top to bottom. The services run the same functions with a wire between the halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle2.speculative.accept import Acceptance, Choose, accept
from eagle2.speculative.draft import DraftNetwork, TreeShape, draft_trees
from eagle2.speculative.tree import Tree


class Drafter(DraftNetwork, Protocol):
    """A draft head that keeps its own cache for B sequences."""

    def extend(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Run the head on new committed rows with the target's true features and keep their KV.

        Per sequence features (R, H) and tokens (R,), each the token after its feature's position, the last one the
        root. Returns the output (B, H) and logits (B, V) of each last row.
        """
        ...


class Target(Protocol):
    """The target with the committed tokens of B sequences in its cache."""

    def verify(self, tree: Tree) -> Tensor:
        """One forward of all nodes at position (committed + depth), each seeing context, ancestors and itself.

        Returns the logits (B, N, V).
        """
        ...

    def commit(self, acceptance: Acceptance) -> list[Tensor]:
        """Keep the accepted paths in the cache, drop the other nodes. Returns each path's features (P, H)."""
        ...


@dataclass(frozen=True, slots=True)
class Cycle:
    """What one cycle did, and per sequence the rows (features, tokens) that the next one begins with."""

    tree: Tree
    acceptance: Acceptance
    features: list[Tensor]
    tokens: list[Tensor]


def cycle(
    drafter: Drafter,
    target: Target,
    features: Sequence[Tensor],
    tokens: Sequence[Tensor],
    shape: TreeShape,
    choice: Callable[[Tree, Tensor], Choose],
) -> Cycle:
    """Draft, verify, accept, commit, for B sequences at once.

    features, tokens: per sequence the rows that the last cycle committed (at first: all of the prompt's), tokens one
    ahead, so that the last one is the root. choice: makes the target's rule out of tree and logits (B, N, V).
    """
    output, logits = drafter.extend(features, tokens)
    roots = torch.stack([sequence[-1] for sequence in tokens])
    tree = draft_trees(drafter, output, logits, roots, shape)
    acceptance = accept(tree, choice(tree, target.verify(tree)))
    committed = [acceptance.committed_tokens(tree, b) for b in range(len(roots))]
    return Cycle(tree, acceptance, target.commit(acceptance), [torch.tensor(run) for run in committed])
