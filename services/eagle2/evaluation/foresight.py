"""Verification without the nodes that are known to fail: acceptance is measured faster, and comes out the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from eagle2.transport.base import ProposerLink
from eagle2.transport.messages import DraftReply, DraftStatus, DraftStep, DraftTree

Watch = Callable[[DraftTree, Sequence[int], Sequence[int]], None]
"""Gets a whole tree, the tokens that are known to come, and the nodes that they go through, the root (0) first."""


class ForesightLink:
    """Takes out of every tree the nodes that an answer that is known already does not go through.

    The engine still verifies what is left, commits and draws by itself: tokens and cycles are those of whole trees as
    long as the answer comes out as it was foretold. Where it does not, or a sequence is not known, trees stay whole.
    One node always stays, so that a tree of which nothing is accepted is still a tree.
    """

    def __init__(self, link: ProposerLink) -> None:
        self._link = link
        self.incarnation = link.incarnation
        self.watch: Watch | None = None
        self._answers: list[tuple[int, list[int]]] = []  # length of the prompt, prompt and answer
        self._said: dict[int, list[int]] = {}  # by sequence: its tokens from position 1 on
        self._known: dict[int, list[int] | None] = {}

    def foretell(self, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """The answers that are known from now on, as prompt and answer; none: all trees stay whole."""
        self._answers = [(length, list(full)) for length, full in {(len(p), (*p, *a)) for p, a in answers}]
        self._said.clear()
        self._known.clear()

    def send(self, step: DraftStep) -> None:
        for sequence in step.closed:
            self._said.pop(sequence, None)
            self._known.pop(sequence, None)
        if self._answers:
            for entry in step.entries:
                said = self._said.setdefault(entry.sequence, [])
                if entry.opening is not None:
                    said[:] = entry.opening.tokens[1:].tolist()  # rows that are held already are not sent
                if not entry.only_asks:
                    said[entry.base :] = entry.tokens.tolist()
        self._link.send(step)

    def receive(self, timeout_s: float) -> DraftReply | None:
        reply = self._link.receive(timeout_s)
        if reply is None or not self._answers:
            return reply
        return replace(reply, trees=tuple(self._cut(tree) for tree in reply.trees))

    def close(self) -> None:
        self._link.close()

    def _cut(self, tree: DraftTree) -> DraftTree:
        if tree.status != DraftStatus.OK:
            return tree
        coming = self._coming(tree.sequence)
        if coming is None or not len(tree.tokens):
            return tree
        path = path_through(tree, coming)
        if self.watch is not None:
            self.watch(tree, coming, path)
        kept = torch.tensor([node - 1 for node in path[1:]] or [0])
        # A path, or one child of the root: either way each node's parent is the one before it.
        parents = torch.arange(len(kept))
        return replace(tree, tokens=tree.tokens[kept], parents=parents, scores=tree.scores[kept])

    def _coming(self, sequence: int) -> Sequence[int] | None:
        """The tokens behind the root, if they are known."""
        said = self._said.get(sequence, [])
        if sequence not in self._known:
            # The first tree of a sequence stands behind its prompt and one token.
            found = [full for length, full in self._answers if length == len(said) and full[1 : length + 1] == said]
            self._known[sequence] = found[0] if len(found) == 1 else None
        full = self._known[sequence]
        if full is None or full[1 : len(said) + 1] != said:
            return None
        return full[len(said) + 1 :]


def path_through(tree: DraftTree, coming: Sequence[int]) -> list[int]:
    """The nodes that these tokens go through, the root (node 0) first."""
    child = {key: i for i, key in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True), start=1)}
    path = [0]
    for token in coming:
        node = child.get((path[-1], token))
        if node is None:
            break
        path.append(node)
    return path
