"""What the proposer is asked about the batch, and the trees that become of its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from eagle2.engine.choice import FixedTrees
from eagle2.engine.pair import Pair
from eagle2.engine.sequence import Sequence
from eagle2.engine.target import TargetRunner
from eagle2.engine.trees import tree_of_reply
from eagle2.kv_cache.slots import Slots
from eagle2.speculative.tree import Tree
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.transport.messages import DraftEntry, DraftStatus, DraftTree

# Rows of one sequence that go to the proposer with one step; a longer span is brought over in several.
_SYNC_ROWS = 512


@dataclass(slots=True)
class Decoding:
    """A sequence's part in a step: its tree, and the slots of the tree's nodes once they have some."""

    sequence: Sequence
    tree: Tree  # of one sequence, B = 1
    slots: Slots = field(default_factory=lambda: np.empty(0, np.int32))


class Drafting:
    """Brings the proposer up to date and gets trees. Whoever has none decodes plainly: a tree of its root alone.

    ``depth``: the most levels of a tree. ``max_model_len``: prompt and output together, in tokens. ``prefill_chunk``:
    prompt tokens that one step takes.
    """

    def __init__(
        self,
        target: TargetRunner,
        pair: Pair,
        trees: FixedTrees,
        stats: Recorder,
        *,
        depth: int,
        max_model_len: int,
        prefill_chunk: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target, self._pair, self._trees, self._stats = target, pair, trees, stats
        self._depth, self._max_model_len, self._prefill_chunk = depth, max_model_len, prefill_chunk
        self._clock = clock

    def draft(self, running: SequenceOf[Sequence]) -> list[Decoding]:
        """The trees of all of ``running`` that decode."""
        prompts = sum(max(sequence.num_to_prefill, 0) for sequence in running)
        if self._pair.is_up:
            self._trees.begin(running, min(prompts, self._prefill_chunk))
        entries = []
        for sequence in running:
            is_asked = self._pair.is_up and sequence.speculate and self._trees.is_wanted(sequence)
            entry = self._entry(sequence) if is_asked else None
            if entry is not None:
                entries.append(entry)
        began = self._clock()
        replies = self._pair.draft(entries, self._trees.shape) if entries else {}
        self._trees.drafted(entries, replies, self._clock() - began)
        return self._decodings(running, replies)

    def _entry(self, sequence: Sequence) -> DraftEntry | None:
        """What the proposer lacks of a sequence, and whether a tree is wanted."""
        if sequence.pairing != self._pair.pairing:
            sequence.pairing, sequence.held = self._pair.pairing, 0
        cached = len(sequence.table)
        # Row i needs the token behind it, which a prompt knows already and a decoding sequence has as its root.
        ready = min(cached, len(sequence.tokens) - 1)
        fits = cached + self._depth + 1 < self._max_model_len
        if sequence.decodes and (sequence.num_left <= 1 or not fits):
            return None
        base = min(sequence.held, ready)
        if base == ready:
            if not sequence.decodes or ready == 0:
                return None
            base -= 1  # the proposer keeps no outputs: the last row is run again
        end = min(ready, base + _SYNC_ROWS)
        sequence.cycle += 1
        return DraftEntry(
            sequence=sequence.id,
            cycle=sequence.cycle,
            base=base,
            features=self._target.features_of(sequence.table.slots[base:end]),
            tokens=torch.tensor(sequence.tokens[base + 1 : end + 1], dtype=torch.int64),
            draft=sequence.decodes and end == ready,
        )

    def _decodings(self, running: SequenceOf[Sequence], replies: Mapping[tuple[int, int], DraftTree]) -> list[Decoding]:
        trees: list[Tree] = []
        decoding = [sequence for sequence in running if sequence.decodes]
        for sequence in running:
            tree = self._tree(sequence, replies.get((sequence.id, sequence.cycle)))
            if sequence.decodes:
                trees.append(tree or Tree.of_roots(torch.tensor([sequence.tokens[-1]])))
        return [Decoding(sequence, tree) for sequence, tree in zip(decoding, self._trees.pruned(trees), strict=True)]

    def _tree(self, sequence: Sequence, reply: DraftTree | None) -> Tree | None:
        """Take note of what the proposer says about a sequence; the tree if it sent one that can be used."""
        if reply is None:
            return None
        sequence.held = reply.held
        if reply.status == DraftStatus.TOO_LONG:
            sequence.speculate = False  # the head was not trained for such positions: plain decoding from here
        elif reply.status == DraftStatus.NON_FINITE:
            self._stats.add(metrics.NON_FINITE_DRAFTS)
        elif reply.status == DraftStatus.OK and sequence.decodes:
            tree = tree_of_reply(sequence.tokens[-1], reply, self._target.model.config.vocab_size)
            if tree is None:
                self._stats.add(metrics.STALE_REPLIES)
            return tree
        return None
