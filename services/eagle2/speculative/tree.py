"""A draft tree. The parents are the truth: depths, mask and paths derive from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_NODE = -1


@dataclass(frozen=True, slots=True)
class Tree:
    """Trees of B sequences. Node 0 is the root, a node's parent comes before it, padding stands at the end.

    tokens:  (B, N) int64, token ids; a padding node has token 0.
    parents: (B, N) int64, node index of the parent; -1 for the root and for padding.
    scores:  (B, N) float32, natural-log probability of the path under the draft; root 0, padding -inf.
    sizes:   (B,) int64, valid nodes of each tree, root included.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    sizes: Tensor

    @staticmethod
    def of_roots(roots: Tensor) -> Tree:
        """Trees of the root alone: plain decoding. roots: (B,) int64."""
        tokens = roots.unsqueeze(1)
        return Tree(
            tokens,
            torch.full_like(tokens, NO_NODE),
            torch.zeros(tokens.shape, dtype=torch.float32, device=roots.device),
            torch.ones_like(roots),
        )

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    def is_node(self) -> Tensor:
        """(B, N) bool, False for padding."""
        return torch.arange(self.num_nodes, device=self.tokens.device) < self.sizes.unsqueeze(1)

    def ancestors(self) -> Tensor:
        """(B, N, N) bool: entry [b, i, j] says that j is i or an ancestor of i. The tree attention mask."""
        batch, nodes = self.parents.shape
        mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=self.parents.device)
        at = torch.arange(nodes, device=self.parents.device).expand(batch, nodes)
        at = at.masked_fill(~self.is_node(), NO_NODE)
        while bool((at >= 0).any()):
            here = at.clamp_min(0).unsqueeze(2)
            mask |= torch.zeros_like(mask).scatter_(2, here, (at >= 0).unsqueeze(2))
            at = self._parent_of(at)
        return mask

    def depths(self) -> Tensor:
        """(B, N) int64: edges from the root; 0 for padding."""
        depth = torch.zeros_like(self.parents)
        at = self.parents
        while bool((at >= 0).any()):
            depth += at >= 0
            at = self._parent_of(at)
        return depth

    def paths(self) -> Tensor:
        """(B, N, P) int64: nodes from the root to each node, itself included, padded with -1. P = deepest + 1."""
        depth = self.depths()
        longest = int(depth.max()) + 1 if depth.numel() else 1
        paths = torch.full((*self.parents.shape, longest), NO_NODE, dtype=torch.int64, device=self.parents.device)
        at = torch.arange(self.num_nodes, device=self.parents.device).expand_as(self.parents)
        at = at.masked_fill(~self.is_node(), NO_NODE)
        place = depth
        while bool((at >= 0).any()):
            column = place.clamp_min(0).unsqueeze(2)
            kept = paths.gather(2, column)
            paths.scatter_(2, column, torch.where((at >= 0).unsqueeze(2), at.unsqueeze(2), kept))
            at, place = self._parent_of(at), place - 1
        return paths

    def pruned(self, num_nodes: int) -> Tree:
        """The best ``num_nodes`` nodes of each tree, the root always among them.

        A child never scores above its parent and ties go to the lower index, so what is left is a tree.
        """
        if num_nodes >= self.num_nodes:
            return self
        drafted = torch.where(self.is_node(), self.scores, -torch.inf)[:, 1:]
        order = drafted.argsort(dim=1, descending=True, stable=True)[:, : num_nodes - 1]
        keep = torch.cat([torch.zeros_like(self.sizes).unsqueeze(1), order.sort(dim=1).values + 1], dim=1)
        sizes = self.sizes.clamp_max(num_nodes)
        # Where each old node went; the root's parent (-1) is looked up in the extra last column.
        moved = torch.full((len(self.sizes), self.num_nodes + 1), NO_NODE, dtype=torch.int64, device=keep.device)
        moved.scatter_(1, keep, torch.arange(num_nodes, device=keep.device).expand_as(keep))
        old_parents = self.parents.gather(1, keep)
        parents = moved.gather(1, torch.where(old_parents < 0, self.num_nodes, old_parents))
        return Tree(self.tokens.gather(1, keep), parents, self.scores.gather(1, keep), sizes)

    def check(self) -> None:
        """Raises ValueError unless every node's parent is a valid node before it and no score rises downwards.

        Padding must look like padding, else acceptance could walk into it.
        """
        valid = self.is_node()
        index = torch.arange(self.num_nodes, device=self.tokens.device)
        drafted = valid & (index > 0)
        if bool(((self.sizes < 1) | (self.sizes > self.num_nodes)).any()):
            raise ValueError(f"a tree here has 1 to {self.num_nodes} nodes, got sizes {self.sizes.tolist()}")
        if bool((self.parents[:, 0] != NO_NODE).any()):
            raise ValueError("a tree begins with its root, whose parent is -1")
        if bool((self.parents[~valid] != NO_NODE).any()):
            raise ValueError(f"padding has the parent -1, got parents {self.parents.tolist()}")
        if bool((drafted & ((self.parents < 0) | (self.parents >= index))).any()):
            raise ValueError(f"a drafted node's parent comes before it, got parents {self.parents.tolist()}")
        rises = self.scores > self.scores.gather(1, self.parents.clamp_min(0))
        if bool((drafted & rises).any()) or bool(self.scores[valid].isnan().any()):
            raise ValueError("a drafted node's score is a number and not above its parent's")

    def _parent_of(self, at: Tensor) -> Tensor:
        above = self.parents.gather(1, at.clamp_min(0))
        return torch.where(at >= 0, above, NO_NODE)
