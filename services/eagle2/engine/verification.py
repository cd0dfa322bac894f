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
from eagle2.engine.pace import PromptPace
from eagle2.engine.reuse import PrefixReuse
from eagle2.engine.sequence import Sequence
from eagle2.engine.target import TargetRunner
from eagle2.engine.trees import Forest
from eagle2.engine.values import Booleans, Integers
from eagle2.speculative.accept import accept
from eagle2.speculative.sampling import choose_token
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

_ACCEPTANCE_WINDOW = 100  # trees
_NO_LOGITS = torch.empty(0, 0)  # of a step whose tokens are all the best ones


class Verification:
    """Verifies, accepts and commits; what is committed goes to the readers."""

    def __init__(
        self,
        target: TargetRunner,
        trees: FixedTrees,
        pace: PromptPace,
        reuse: PrefixReuse,
        departures: Departures,
        stats: Recorder,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target, self._trees, self._pace, self._reuse = target, trees, pace, reuse
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
        trees = Forest.joined([item.tree for item in decoding]) if decoding else None
        if trees is not None:
            paths = trees.paths(np.concatenate([item.slots for item in decoding]))
            tables = [item.sequence.table.slots for item in decoding]
            builder.add_trees(tables, trees.sizes, trees.tokens, trees.depths, paths)
            wanted.extend(range(trees.num_nodes))
        starting = []  # prompts that end here, without a token yet
        spans = [(len(sequence.table) - count, count) for sequence, count in prefilling]
        for (sequence, count), (first, _) in zip(prefilling, spans, strict=True):
            builder.add_span(sequence.table.slots, first, sequence.tokens[first : first + count])
            if not sequence.has_root and sequence.num_to_prefill == 0:
                starting.append(sequence)
                wanted.append(len(builder) - 1)
        features = self._target.forward(builder.build())
        for sequence, count in prefilling:
            self._stats.add(metrics.PREFILL_TOKENS, count)
            self._reuse.keep(sequence)
        if wanted:
            asked = [*(item.sequence for item in decoding), *starting]
            if all(sequence.rule.is_plain_greedy for sequence in asked):
                logits, argmax = _NO_LOGITS, self._target.best_of(features, wanted)
            else:
                logits = self._target.logits(features, wanted)
                argmax = self._target.best(logits)
            if trees is not None:
                self._accept(decoding, trees, logits, argmax)
            num_nodes = len(wanted) - len(starting)
            self._begin(starting, logits[num_nodes:], argmax[num_nodes:])
        seconds = self._clock() - began
        self._trees.verified(len(builder), seconds, prompt_s=self._pace.seconds(spans), is_alone=is_alone)
        self._stats.add(metrics.VERIFY_SECONDS, seconds)

    def _accept(self, decoding: list[Decoding], trees: Forest, logits: Tensor, argmax: Tensor) -> None:
        """trees: those of ``decoding``. logits (T, V), none where nothing is sampled, and the best tokens (T,): of
        all their nodes first."""
        starts = trees.starts
        rows, best = starts.tolist(), argmax.tolist()
        sampled = [not item.sequence.rule.is_plain_greedy for item in decoding]

        def choose(sequences: Tensor, nodes: Tensor) -> Tensor:
            picked = []
            for b, node in zip(sequences.tolist(), nodes.tolist(), strict=True):
                row = rows[b] + node
                picked.append(_choose_at(decoding[b], node, logits[row]) if sampled[b] else best[row])
            return torch.tensor(picked)

        acceptance = accept(trees.padded(), choose)
        path = acceptance.path.numpy()
        nodes = (path + starts[:, None])[path >= 0]  # of all paths, one after another
        accepted = np.zeros(trees.num_nodes, np.bool_)
        accepted[nodes] = True
        counts = acceptance.counts.tolist()
        self._keep_slots(decoding, nodes, accepted, counts)
        is_finite = argmax.numpy()[: trees.num_nodes] >= 0
        sound = np.logical_and.reduceat(is_finite | ~accepted, starts).tolist()
        tokens, end = trees.tokens[nodes].tolist(), 0
        outcomes = zip(decoding, counts, acceptance.bonus.tolist(), sound, strict=True)
        for item, count, bonus, is_sound in outcomes:
            end += count + 1
            self._commit(item, [*tokens[end - count : end], bonus], is_sound)
        if all(sound):
            self._judge(trees, accepted, acceptance.counts.numpy())
        elif any(sound):
            left = [item.tree for item, is_sound in zip(decoding, sound, strict=True) if is_sound]
            of_left = accepted[np.repeat(sound, trees.sizes)]
            self._judge(Forest.joined(left), of_left, acceptance.counts.numpy()[sound])

    def _keep_slots(self, decoding: list[Decoding], nodes: Integers, accepted: Booleans, counts: list[int]) -> None:
        """Of the trees' slots the tables take those of accepted ``nodes``, in order; the others' are free."""
        slots = np.concatenate([item.slots for item in decoding])
        self._target.pool.release(slots[~accepted])
        kept, end = slots[nodes], 0
        for item, count in zip(decoding, counts, strict=True):
            item.sequence.table.append(kept[end : (end := end + count + 1)])

    def _commit(self, item: Decoding, tokens: list[int], is_sound: bool) -> None:
        """Accepted tokens, and the target's own behind them."""
        sequence = item.sequence
        if not is_sound:
            sentence = f"The model's output is not a number after {sequence.num_output} tokens."
            self._departures.fail_unsound(sequence, sentence)
            return
        sequence.num_cycles += 1
        sequence.num_drafted += item.tree.num_nodes - 1
        self._deliver(sequence, tokens, len(tokens) - 1)

    def _begin(self, starting: list[Sequence], logits: Tensor, argmax: Tensor) -> None:
        """First tokens of sequences whose prompts end here. logits (S, V) and the best tokens (S,): theirs."""
        for row, (sequence, token) in enumerate(zip(starting, argmax.tolist(), strict=True)):
            if token < 0:
                self._departures.fail_unsound(sequence, "The model's output is not a number for this prompt.")
                continue
            if not sequence.rule.is_plain_greedy:
                token = choose_token(logits[row], sequence.rule, len(sequence.tokens), sequence.counts)
            self._deliver(sequence, [token])

    def _deliver(self, sequence: Sequence, tokens: list[int], accepted: int = 0) -> None:
        kept = sequence.commit(tokens, accepted)
        self._stats.add(metrics.GENERATION_TOKENS, len(kept))
        if sequence.finish_reason is not None:
            self._departures.finish(sequence)

    def _judge(self, trees: Forest, accepted: Booleans, counts: Integers) -> None:
        """What became of trees: ``accepted`` nodes (M,), and ``counts`` (B,) of them without roots."""
        drafted = np.array(trees.sizes) - 1
        lengths = counts[drafted > 0]
        if not len(lengths):
            return
        self._trees.judged(trees, accepted)
        self._stats.add(metrics.NUM_DRAFTS, len(lengths))
        self._stats.add(metrics.NUM_DRAFT_TOKENS, int(drafted.sum()))
        self._stats.add(metrics.NUM_ACCEPTED_TOKENS, int(lengths.sum()))
        for position in range(int(lengths.max())):
            self._stats.add(metrics.NUM_ACCEPTED_TOKENS_PER_POS, int((lengths > position).sum()), pos=position)
        self._recent.extend((lengths + 1).tolist())
        mean = sum(self._recent) / len(self._recent)
        self._stats.set(metrics.MEAN_ACCEPTANCE_LENGTH, mean)
        full = len(self._recent) == _ACCEPTANCE_WINDOW
        self._stats.set(metrics.LOW_ACCEPTANCE, float(full and mean < 1.05))


def _choose_at(item: Decoding, node: int, logits: Tensor) -> int:
    """The target's token after a tree node, with the counts of that node's own path."""
    sequence, tree = item.sequence, item.tree
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    counts = sequence.counts
    if counts is not None:
        counts = counts.with_path(tree.tokens[path].tolist())
    return choose_token(logits, sequence.rule, len(sequence.tokens) + len(path), counts)
