"""What became of drafted nodes: the confidence that the draft had in each, and whether the target agreed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle2.evaluation.foresight import path_through
from eagle2.transport.base import ProposerLink
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep, DraftTree

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Samples:
    """M predictions with their outcomes. ``depth`` is 1 for a child of the root.

    sequence (M,), depth (M,): int64. probability (M,): float64, what was predicted. accepted (M,): bool.
    """

    sequence: Integers
    depth: Integers
    probability: Floats
    accepted: Booleans

    def __len__(self) -> int:
        return len(self.probability)

    def where(self, keep: Booleans) -> Samples:
        return Samples(self.sequence[keep], self.depth[keep], self.probability[keep], self.accepted[keep])


@dataclass(frozen=True, slots=True)
class Observations:
    """N drafted nodes whose fate is known.

    confidences: (N, D) float64, of the nodes on the path to each node, itself at column ``depth - 1``, NaN behind it.
    reached: the parent was accepted, so that the target chose among this node and its siblings.
    accepted: the node itself was. A node that was not reached was not accepted.
    first: no sibling had more confidence.
    trees: how many trees the tokens behind their root are known of; unobserved: of how many they are not.
    """

    sequence: Integers
    depth: Integers
    confidences: Floats
    reached: Booleans
    accepted: Booleans
    first: Booleans
    trees: int
    unobserved: int

    def steps(self) -> Samples:
        """The draft's confidence in each token that the target decided on (the paper's figure 6)."""
        own = self.confidences[np.arange(len(self.depth)), self.depth - 1]
        return Samples(self.sequence, self.depth, own, self.accepted).where(self.reached)

    def first_choices(self) -> Samples:
        """Of ``steps``, the likeliest token of each place: the top label of a classifier."""
        return self.steps().where(self.first[self.reached])

    def paths(self) -> Samples:
        """The value of every node: the product of the confidences down to it, by which trees are grown and cut."""
        return Samples(self.sequence, self.depth, np.nanprod(self.confidences, axis=1), self.accepted)

    @property
    def halves(self) -> tuple[Observations, Observations]:
        """Every other sequence: one half to fit on, one to measure on, no text in both."""
        known = np.unique(self.sequence)
        first = np.isin(self.sequence, known[::2])
        return self._where(first), self._where(~first)

    def _where(self, keep: Booleans) -> Observations:
        return Observations(
            sequence=self.sequence[keep],
            depth=self.depth[keep],
            confidences=self.confidences[keep],
            reached=self.reached[keep],
            accepted=self.accepted[keep],
            first=self.first[keep],
            trees=self.trees,
            unobserved=self.unobserved,
        )


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A tree that waits for the tokens behind its root, which stands at position ``root`` of its sequence."""

    root: int
    tree: DraftTree


class CalibrationRecorder:
    """Watches a pair: every tree that comes back, and with the next message what the sequence went on with.

    A draft entry carries the tokens that were committed since the one before, so a tree can be walked with them. That
    holds for any sampling, and whether or not the verifier used the tree. What follows the last tree of a sequence is
    not seen. Sequences are told apart by the engine's numbers: one recorder watches one engine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the engine's thread records, another one reads
        self._asked: dict[int, tuple[int, int]] = {}  # sequence: cycle, position of the root
        self._waiting: dict[int, _Waiting] = {}
        self._clear()

    def wrap(self, link: ProposerLink) -> ProposerLink:
        """The link to use in its place. A new link is a new lease, so trees of an earlier one end unobserved."""
        self._forget_all()
        return _WatchedLink(link, self)

    def take(self) -> Observations:
        """Everything seen since the last call; trees that still wait count as unobserved."""
        self._forget_all()
        with self._lock:
            deepest = max((len(row) for row in self._confidences), default=1)
            padded = [row + [np.nan] * (deepest - len(row)) for row in self._confidences]
            taken = Observations(
                sequence=np.array(self._sequences, dtype=np.int64),
                depth=np.array([len(row) for row in self._confidences], dtype=np.int64),
                confidences=np.array(padded, dtype=np.float64).reshape(len(padded), deepest),
                reached=np.array(self._reached, dtype=np.bool_),
                accepted=np.array(self._accepted, dtype=np.bool_),
                first=np.array(self._first, dtype=np.bool_),
                trees=self._trees,
                unobserved=self._unobserved,
            )
            self._clear()
        return taken

    def sent(self, step: DraftStep) -> None:
        """Note the questions of a step, and walk the trees that its tokens answer."""
        with self._lock:
            for sequence in step.closed:
                self._forget(sequence)
            for entry in step.entries:
                self._walk(entry)
                self._asked.pop(entry.sequence, None)
                if entry.draft:
                    self._asked[entry.sequence] = entry.cycle, entry.base + len(entry.tokens)

    def received(self, reply: DraftReply) -> None:
        """Keep the trees that were asked for; late and doubled ones are passed over."""
        with self._lock:
            for tree in reply.trees:
                cycle, root = self._asked.get(tree.sequence, (-1, -1))
                if tree.cycle != cycle:
                    continue
                del self._asked[tree.sequence]
                if tree.status == DraftStatus.OK and _is_tree(tree):
                    self._waiting[tree.sequence] = _Waiting(root, tree)

    def _walk(self, entry: DraftEntry) -> None:
        waiting = self._waiting.pop(entry.sequence, None)
        if waiting is None:
            return
        first = waiting.root - entry.base
        # Tokens before the root are sent anew where the proposer has lost rows.
        followed = entry.tokens.tolist()[first:] if first >= 0 else []
        if not followed:
            self._unobserved += 1
            return
        self._record(waiting.tree, followed)
        self._trees += 1

    def _record(self, tree: DraftTree, followed: Sequence[int]) -> None:
        """Note the fate of every node. Where the tokens end before the path does, what lies below it is unknown."""
        path = path_through(tree, followed)
        unknown: set[int] = {path[-1]} if len(path) > len(followed) else set()
        accepted = set(path)
        parents, scores = tree.parents.tolist(), tree.scores.tolist()
        confidences: list[list[float]] = [[]]
        best: dict[int, int] = {}  # by parent: its likeliest child
        for node, (parent, score) in enumerate(zip(parents, scores, strict=True), start=1):
            if parent not in best or score > scores[best[parent] - 1]:
                best[parent] = node
        for node, (parent, score) in enumerate(zip(parents, scores, strict=True), start=1):
            above = 0.0 if parent == 0 else scores[parent - 1]
            confidences.append([*confidences[parent], float(np.exp(min(score - above, 0.0)))])
            if parent in unknown:
                unknown.add(node)
                continue
            self._sequences.append(tree.sequence)
            self._confidences.append(confidences[node])
            self._reached.append(parent in accepted)
            self._accepted.append(node in accepted)
            self._first.append(node == best[parent])

    def _forget(self, sequence: int) -> None:
        self._asked.pop(sequence, None)
        if self._waiting.pop(sequence, None) is not None:
            self._unobserved += 1

    def _forget_all(self) -> None:
        with self._lock:
            for sequence in [*self._waiting]:
                self._forget(sequence)
            self._asked.clear()

    def _clear(self) -> None:
        self._sequences: list[int] = []
        self._confidences: list[list[float]] = []
        self._reached: list[bool] = []
        self._accepted: list[bool] = []
        self._first: list[bool] = []
        self._trees = self._unobserved = 0


class _WatchedLink:
    """A ``ProposerLink`` that shows the recorder what passes."""

    def __init__(self, link: ProposerLink, recorder: CalibrationRecorder) -> None:
        self._link, self._recorder = link, recorder
        self.incarnation = link.incarnation

    def send(self, step: DraftStep) -> None:
        # Before the link has it: within a process the reply is made while it is sent.
        self._recorder.sent(step)
        self._link.send(step)

    def receive(self, timeout_s: float) -> DraftReply | None:
        reply = self._link.receive(timeout_s)
        if reply is not None and reply.incarnation == self.incarnation:
            self._recorder.received(reply)
        return reply

    def close(self) -> None:
        self._link.close()


def _is_tree(tree: DraftTree) -> bool:
    """One to many nodes, each behind its parent, with scores that are finite."""
    nodes = len(tree.tokens)
    if nodes == 0 or len(tree.parents) != nodes or len(tree.scores) != nodes:
        return False
    before = all(0 <= parent <= i for i, parent in enumerate(tree.parents.tolist()))
    return before and bool(tree.scores.isfinite().all())
