"""The target's part of a step: one forward for trees and prompts alike, then what it says about each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.engine.choice import FixedTrees
from eagle2.engine.departures import Departures
from eagle2.engine.drafting import Decoding
from eagle2.engine.reuse import PrefixReuse
from eagle2.engine.sequence import Sequence
from eagle2.engine.target import TargetRunner
from eagle2.engine.trees import batched
from eagle2.speculative.accept import Acceptance, accept
from eagle2.speculative.sampling import choose_token
from eagle2.speculative.tree import Tree
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

_ACCEPTANCE_WINDOW = 100  # trees


class Verification:
    """Verifies, accepts and commits; what is committed goes to the readers."""

    def __init__(
        self,
        target: TargetRunner,
        trees: FixedTrees,
        reuse: PrefixReuse,
        departures: Departures,
        stats: Recorder,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target, self._trees, self._reuse = target, trees, reuse
        self._departures, self._stats, self._clock = departures, stats, clock
        self._recent: deque[int] = deque(maxlen=_ACCEPTANCE_WINDOW)

    def verify(
        self, decoding: list[Decoding], prefilling: list[tuple[Sequence, int]], *, is_alone: bool = True
    ) -> None:
        """Trees whose nodes have slots, and (sequence, count) of prompt tokens that stand at their tables' ends.

        is_alone: the proposer does nothing meanwhile; else the step's time is no measure of its rows.
        """
        if not decoding and not prefilling:
            return
        began = self._clock()
        builder = RowsBuilder()
        wanted: list[int] = []  # rows whose logits are needed
        tree = batched([item.tree for item in decoding]) if decoding else None
        if tree is not None:
            for item, depths, paths in zip(decoding, tree.depths().numpy(), tree.paths().numpy(), strict=True):
                nodes = item.tree.num_nodes
                wanted.extend(range(len(builder), len(builder) + nodes))
                builder.add_nodes(
                    item.sequence.table.slots,
                    item.tree.tokens[0].tolist(),
                    depths[:nodes],
                    np.where(paths[:nodes] >= 0, item.slots[paths[:nodes]], -1).astype(np.int32),
                )
        starting = []  # prompts that end here, without a token yet
        for sequence, count in prefilling:
            first = len(sequence.table) - count
            builder.add_span(sequence.table.slots, first, sequence.tokens[first : first + count])
            if not sequence.has_root and sequence.num_to_prefill == 0:
                starting.append(sequence)
                wanted.append(len(builder) - 1)
        features = self._target.forward(builder.build())
        for sequence, count in prefilling:
            self._stats.add(metrics.PREFILL_TOKENS, count)
            self._reuse.keep(sequence)
        if wanted:
            logits = self._target.logits(features, wanted)
            self._accept(decoding, tree, starting, logits)
        seconds = self._clock() - began
        self._trees.verified(len(builder), seconds, has_prefill=bool(prefilling), is_alone=is_alone)
        self._stats.add(metrics.VERIFY_SECONDS, seconds)

    def _accept(self, decoding: list[Decoding], tree: Tree | None, starting: list[Sequence], logits: Tensor) -> None:
        """tree: that of all of ``decoding``. logits (T, V): of all their nodes, then of the last row of each prompt
        that ends here."""
        argmax = self._target.best(logits)
        sound = (argmax >= 0).tolist()
        firsts = np.cumsum([0, *(item.tree.num_nodes for item in decoding)])
        if tree is not None:
            offsets = torch.from_numpy(firsts[:-1])

            def choose(sequences: Tensor, nodes: Tensor) -> Tensor:
                rows = offsets[sequences] + nodes
                picked = argmax[rows]
                for i, (b, node, row) in enumerate(zip(sequences.tolist(), nodes.tolist(), rows.tolist(), strict=True)):
                    if not decoding[b].sequence.rule.is_plain_greedy:
                        picked[i] = _choose_at(decoding[b], node, logits[row])
                return picked

            acceptance = accept(tree, choose)
            for b, item in enumerate(decoding):
                visited = (int(firsts[b]) + node for node in acceptance.path[b].tolist() if node >= 0)
                self._commit(item, tree, acceptance, b, all(sound[row] for row in visited))
        for row, sequence in enumerate(starting, start=int(firsts[-1])):
            if not sound[row]:
                self._departures.fail_unsound(sequence, "The model's output is not a number for this prompt.")
                continue
            token = int(argmax[row])
            if not sequence.rule.is_plain_greedy:
                token = choose_token(logits[row], sequence.rule, len(sequence.tokens), sequence.counts)
            self._deliver(sequence, [token])

    def _commit(self, item: Decoding, tree: Tree, acceptance: Acceptance, b: int, sound: bool) -> None:
        sequence = item.sequence
        accepted = int(acceptance.counts[b])
        path = acceptance.path[b, : accepted + 1].tolist()
        sequence.table.commit(item.slots, path)
        if not sound:
            sentence = f"The model's output is not a number after {sequence.num_output} tokens."
            self._departures.fail_unsound(sequence, sentence)
            return
        drafted = item.tree.num_nodes - 1
        sequence.num_cycles += 1
        sequence.num_drafted += drafted
        self._deliver(sequence, acceptance.committed_tokens(tree, b), accepted)
        if drafted:
            self._trees.judged(item.tree, path)
            self._count_tree(drafted, accepted)

    def _deliver(self, sequence: Sequence, tokens: list[int], accepted: int = 0) -> None:
        kept = sequence.commit(tokens, accepted)
        self._stats.add(metrics.GENERATION_TOKENS, len(kept))
        if sequence.finish_reason is not None:
            self._departures.finish(sequence)

    def _count_tree(self, drafted: int, accepted: int) -> None:
        self._stats.add(metrics.NUM_DRAFTS)
        self._stats.add(metrics.NUM_DRAFT_TOKENS, drafted)
        self._stats.add(metrics.NUM_ACCEPTED_TOKENS, accepted)
        for position in range(accepted):
            self._stats.add(metrics.NUM_ACCEPTED_TOKENS_PER_POS, pos=position)
        self._recent.append(accepted + 1)
        mean = sum(self._recent) / len(self._recent)
        self._stats.set(metrics.MEAN_ACCEPTANCE_LENGTH, mean)
        full = len(self._recent) == _ACCEPTANCE_WINDOW
        self._stats.set(metrics.LOW_ACCEPTANCE, float(full and mean < 1.05))


def _choose_at(item: Decoding, node: int, logits: Tensor) -> int:
    """The target's token after a tree node, with the counts of that node's own path."""
    sequence = item.sequence
    parents = item.tree.parents[0].tolist()
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = parents[node]
    counts = sequence.counts
    if counts is not None:
        counts = counts.with_path(item.tree.tokens[0, path].tolist())
    return choose_token(logits, sequence.rule, len(sequence.tokens) + len(path), counts)
