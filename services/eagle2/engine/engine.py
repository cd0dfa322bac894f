"""The cycle loop: one thread that drafts, verifies and commits for all sequences of the batch, step after step."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.engine.budget import AdaptiveBudget
from eagle2.engine.choice import AdaptiveTrees, FixedTrees
from eagle2.engine.pair import Pair
from eagle2.engine.reuse import PrefixReuse
from eagle2.engine.scheduler import Scheduler
from eagle2.engine.sequence import Sequence, Sink, rule_of
from eagle2.engine.target import TargetRunner
from eagle2.engine.trees import batched, tree_of_reply
from eagle2.kv_cache.slots import OutOfSlotsError, Slots, SlotTable
from eagle2.models.target import TargetModel
from eagle2.protocol import GenerationRequest
from eagle2.speculative.accept import Acceptance, accept
from eagle2.speculative.draft import TreeShape
from eagle2.speculative.sampling import TokenCounts, choose_token
from eagle2.speculative.tree import Tree
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.text.detokenizer import TextStream
from eagle2.text.tokenizer import Tokenizer
from eagle2.transport.messages import DraftEntry, DraftStatus

logger = logging.getLogger(__name__)

# Rows of one sequence that go to the proposer with one step; a longer span is brought over in several.
_SYNC_ROWS = 512
_ACCEPTANCE_WINDOW = 100  # trees


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """max_model_len: prompt and output together, in tokens. prefill_chunk: prompt tokens that one step takes.
    prefix_cache: whether what was read is kept for later requests."""

    max_model_len: int
    max_sequences: int
    prefill_chunk: int
    prefix_cache: bool = True


@dataclass(slots=True)
class _Decoding:
    """A sequence's part in a step: its tree, and the slots of the tree's nodes."""

    sequence: Sequence
    tree: Tree  # of one sequence, B = 1
    slots: Slots


class Engine:
    """Owns the truth of all sequences. ``submit`` and ``cancel`` may be called from any thread."""

    def __init__(
        self,
        target: TargetRunner,
        tokenizer: Tokenizer,
        pair: Pair,
        stats: Recorder,
        limits: EngineLimits,
        shape: TreeShape,
        eos_token_ids: frozenset[int],
        *,
        budget: AdaptiveBudget | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        """``shape``: every tree's, and without a ``budget`` no other. ``clock``: seconds, for what a step costs."""
        self._target, self._tokenizer, self._pair, self.stats = target, tokenizer, pair, stats
        self._limits, self._shape, self._eos = limits, shape, eos_token_ids
        self._clock = clock
        self._trees = FixedTrees(shape)
        if budget is not None:
            self._trees = AdaptiveTrees(budget, stats, limits.max_sequences, clock=clock)
        self._on_thread_start = on_thread_start
        self._reuse = PrefixReuse(target.pool, stats, enabled=limits.prefix_cache)
        self.scheduler = Scheduler(target.pool, limits.max_sequences, self._reuse)
        self._ids = itertools.count(1)
        self._inbox: deque[Sequence] = deque()
        self._work = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self._recent: deque[int] = deque(maxlen=_ACCEPTANCE_WINDOW)
        stats.set(metrics.KV_SLOTS_CAPACITY, target.pool.num_slots, side="target")
        self._set_gauges()

    # Called from any thread

    @property
    def target_model(self) -> TargetModel:
        return self._target.model

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="eagle2-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, sink: Sink) -> Sequence:
        """Queue a generation; its items go to ``sink`` from the engine thread."""
        rule = rule_of(request)
        counts = None
        if rule.needs_counts:
            vocab_size = self._target.model.config.vocab_size
            counts = TokenCounts.of_prompt(request.prompt_ids, vocab_size, self._target.device)
            counts.add(request.output_ids)
        text = TextStream(self._tokenizer, request.stop.stop_strings)
        text.prime(request.output_ids)
        ends = frozenset(request.stop.stop_token_ids) | (frozenset() if request.stop.ignore_eos else self._eos)
        sequence = Sequence(
            id=next(self._ids),
            request=request,
            table=SlotTable(self._target.pool),
            text=text,
            sink=sink,
            end_ids=ends,
            length_limit=self._limits.max_model_len,
            rule=rule,
            tokens=[*request.prompt_ids, *request.output_ids],
            counts=counts,
            speculate=request.speculation,
        )
        with self._work:
            self._inbox.append(sequence)
            self._work.notify()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a generation whose reader has left; nothing happens when it has ended already."""
        if sequence.finish_reason is None:
            sequence.cancelled = True
            with self._work:
                self._work.notify()

    def stop(self) -> None:
        """End the thread; generations that still run end with an error."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
        self._pair.close()

    # The engine thread

    def _run(self) -> None:
        self._on_thread_start()
        try:
            while not self._stopping:
                if not self.step():
                    with self._work:
                        if not self._inbox and not self._stopping:
                            # Wakes by itself now and then: the pair's state and freed rows are looked after.
                            self._work.wait(timeout=0.2)
        except BaseException as error:
            logger.exception("The engine failed.")
            self.failure = error
        finally:
            self._fail_all("The engine has stopped.")

    def step(self) -> bool:
        """One cycle for the whole batch. False when there was nothing to do."""
        self._take_inbox()
        self._end_cancelled()
        self.scheduler.admit()
        self._pair.poll()
        if not self.scheduler.running:
            self._pair.flush()
            self._trees.idle(self._pair, self._target)
            self._set_gauges()
            return False
        decoding = self._draft()
        decoding = self._allocate(decoding)
        prefilling = self._extend_prefill()
        self._verify(decoding, prefilling)
        self.stats.add(metrics.CYCLES)
        self._set_gauges()
        return True

    def _take_inbox(self) -> None:
        while self._inbox:
            sequence = self._inbox.popleft()
            if sequence.num_left <= 0:
                sequence.finish_reason = "length"
                sequence.commit([])
            else:
                self.stats.add(metrics.PROMPT_TOKENS, sequence.num_prompt)
                self.scheduler.add(sequence)

    def _end_cancelled(self) -> None:
        now = time.time()
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            deadline = sequence.request.deadline
            if sequence.cancelled:
                sequence.finish_reason = "error"
                self.stats.add(metrics.NUM_REQUESTS_ABORTED)
                self._retire(sequence)
            elif deadline is not None and now > deadline:
                self._fail(sequence, f"The deadline passed after {sequence.num_output} tokens.")

    def _draft(self) -> list[_Decoding]:
        """Bring the proposer up to date and get this step's trees. Sequences without a tree decode plainly."""
        prompts = sum(max(sequence.num_to_prefill, 0) for sequence in self.scheduler.running)
        if self._pair.is_up:
            self._trees.begin(self.scheduler.running, min(prompts, self._limits.prefill_chunk))
        entries, plain = [], {}
        for sequence in self.scheduler.running:
            is_asked = self._pair.is_up and sequence.speculate and self._trees.is_wanted(sequence)
            entry = self._entry(sequence) if is_asked else None
            if entry is not None:
                entries.append(entry)
            if sequence.has_root and sequence.num_to_prefill == 0:
                plain[sequence.id] = Tree.of_roots(torch.tensor([sequence.tokens[-1]]))
        began = self._clock()
        trees = self._pair.draft(entries, self._trees.shape) if entries else {}
        self._trees.drafted(entries, trees, self._clock() - began)
        for sequence in self.scheduler.running:
            reply = trees.get((sequence.id, sequence.cycle))
            if reply is None:
                continue
            sequence.held = reply.held
            if reply.status == DraftStatus.TOO_LONG:
                sequence.speculate = False  # the head was not trained for such positions: plain decoding from here
            elif reply.status == DraftStatus.NON_FINITE:
                self.stats.add(metrics.NON_FINITE_DRAFTS)
            elif reply.status == DraftStatus.OK and sequence.id in plain:
                tree = tree_of_reply(sequence.tokens[-1], reply, self._target.model.config.vocab_size)
                if tree is None:
                    self.stats.add(metrics.STALE_REPLIES)
                else:
                    plain[sequence.id] = tree
        none = np.empty(0, np.int32)
        decoding = [sequence for sequence in self.scheduler.running if sequence.id in plain]
        verified = self._trees.pruned([plain[sequence.id] for sequence in decoding])
        return [_Decoding(sequence, tree, none) for sequence, tree in zip(decoding, verified, strict=True)]

    def _entry(self, sequence: Sequence) -> DraftEntry | None:
        """What the proposer lacks of a sequence, and whether a tree is wanted."""
        if sequence.pairing != self._pair.pairing:
            sequence.pairing, sequence.held = self._pair.pairing, 0
        cached = len(sequence.table)
        # Row i needs the token behind it, which a prompt knows already and a decoding sequence has as its root.
        ready = min(cached, len(sequence.tokens) - 1)
        decoding = sequence.has_root and sequence.num_to_prefill == 0
        fits = cached + self._shape.depth + 1 < self._limits.max_model_len
        if decoding and (sequence.num_left <= 1 or not fits):
            return None
        base = min(sequence.held, ready)
        if base == ready:
            if not decoding or ready == 0:
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
            draft=decoding and end == ready,
        )

    def _allocate(self, decoding: list[_Decoding]) -> list[_Decoding]:
        """Slots for all nodes, oldest sequence first; short of slots, trees shrink to their root, then the newest
        sequence is put back into the queue."""
        granted = []
        for item in decoding:
            if item.sequence not in self.scheduler.running:
                continue
            while True:
                try:
                    item.slots = self._target.pool.allocate(item.tree.num_nodes)
                    granted.append(item)
                    break
                except OutOfSlotsError:
                    if item.tree.num_nodes > 1:
                        item.tree = item.tree.pruned(1)
                        continue
                victim = self._preempt()
                if victim is None:
                    self._fail(item.sequence, f"The cache of {self._target.pool.num_slots} slots is too small for it.")
                if victim is None or victim is item.sequence:
                    break
        return granted

    def _preempt(self) -> Sequence | None:
        victim = self.scheduler.preempt_newest()
        if victim is not None:
            self.stats.add(metrics.NUM_PREEMPTIONS)
            self._pair.forget(victim.id)
            victim.held = 0
        return victim

    def _extend_prefill(self) -> list[tuple[Sequence, int]]:
        """Slots for this step's prompt tokens; (sequence, count), as many as there are slots for."""
        taken = []
        for sequence, count in self.scheduler.plan_prefill(self._limits.prefill_chunk):
            count = min(count, self._target.pool.num_available)
            if count:
                sequence.table.extend(count)
                taken.append((sequence, count))
        running = self.scheduler.running
        # Nobody decodes and nobody can go on reading: the newest makes room for the others.
        stuck = bool(running) and not taken and all(s.num_to_prefill > 0 for s in running)
        if stuck and self._preempt() is None:
            self._fail(running[0], f"The cache of {self._target.pool.num_slots} slots is too small for it.")
        return taken

    def _verify(self, decoding: list[_Decoding], prefilling: list[tuple[Sequence, int]]) -> None:
        """One forward for trees and prompts alike, then what the target says about each."""
        # A sequence that was preempted after its tree got slots has given up its table; its node slots go too.
        lost = [item for item in decoding if item.sequence not in self.scheduler.running]
        for item in lost:
            self._target.pool.release(item.slots)
        decoding = [item for item in decoding if item.sequence in self.scheduler.running]
        prefilling = [(s, count) for s, count in prefilling if s in self.scheduler.running]
        if not decoding and not prefilling:
            return
        began = self._clock()
        builder = RowsBuilder()
        wanted: list[int] = []  # rows whose logits are needed
        for item in decoding:
            paths = item.tree.paths()[0].numpy()
            wanted.extend(range(len(builder), len(builder) + item.tree.num_nodes))
            builder.add_nodes(
                item.sequence.table.slots,
                item.tree.tokens[0].tolist(),
                item.tree.depths()[0].numpy(),
                np.where(paths >= 0, item.slots[paths], -1).astype(np.int32),
            )
        starting = []  # prompts that end here, without a token yet
        for sequence, count in prefilling:
            first = len(sequence.table) - count
            builder.add_span(sequence.table.slots, first, sequence.tokens[first : first + count])
            if not sequence.has_root and sequence.num_to_prefill == 0:
                starting.append(sequence)
                wanted.append(len(builder) - 1)
        features = self._target.forward(builder.build(self._target.device))
        for sequence, count in prefilling:
            self.stats.add(metrics.PREFILL_TOKENS, count)
            self._reuse.keep(sequence)
        if wanted:
            logits = self._target.logits(features[wanted])
            self._accept(decoding, starting, logits)
        seconds = self._clock() - began
        self._trees.verified(len(builder), seconds, has_prefill=bool(prefilling))
        self.stats.add(metrics.VERIFY_SECONDS, seconds)

    def _accept(self, decoding: list[_Decoding], starting: list[Sequence], logits: Tensor) -> None:
        best = logits.max(dim=1)
        sound = best.values.isfinite().tolist()
        argmax = best.indices.cpu()
        firsts = np.cumsum([0, *(item.tree.num_nodes for item in decoding)])
        if decoding:
            tree = batched([item.tree for item in decoding])
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
                self._fail(sequence, "The model's output is not a number for this prompt.")
                self._reuse.clear()
                continue
            token = int(argmax[row])
            if not sequence.rule.is_plain_greedy:
                token = choose_token(logits[row], sequence.rule, len(sequence.tokens), sequence.counts)
            self._deliver(sequence, [token])

    def _commit(self, item: _Decoding, tree: Tree, acceptance: Acceptance, b: int, sound: bool) -> None:
        sequence = item.sequence
        accepted = int(acceptance.counts[b])
        path = acceptance.path[b, : accepted + 1].tolist()
        sequence.table.commit(item.slots, path)
        if not sound:
            self._fail(sequence, f"The model's output is not a number after {sequence.num_output} tokens.")
            self._reuse.clear()
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
        self.stats.add(metrics.GENERATION_TOKENS, len(kept))
        if sequence.finish_reason is not None:
            self.stats.add(metrics.REQUEST_SUCCESS, finished_reason=sequence.finish_reason)
            self._retire(sequence)

    def _count_tree(self, drafted: int, accepted: int) -> None:
        self.stats.add(metrics.NUM_DRAFTS)
        self.stats.add(metrics.NUM_DRAFT_TOKENS, drafted)
        self.stats.add(metrics.NUM_ACCEPTED_TOKENS, accepted)
        for position in range(accepted):
            self.stats.add(metrics.NUM_ACCEPTED_TOKENS_PER_POS, pos=position)
        self._recent.append(accepted + 1)
        mean = sum(self._recent) / len(self._recent)
        self.stats.set(metrics.MEAN_ACCEPTANCE_LENGTH, mean)
        full = len(self._recent) == _ACCEPTANCE_WINDOW
        self.stats.set(metrics.LOW_ACCEPTANCE, float(full and mean < 1.05))

    def _fail(self, sequence: Sequence, sentence: str) -> None:
        sequence.fail(sentence)
        self.stats.add(metrics.NUM_REQUESTS_FAILED)
        self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """Free a sequence's slots on both sides."""
        self.scheduler.remove(sequence)
        if sequence.pairing == self._pair.pairing and self._pair.is_up:
            self._pair.forget(sequence.id)

    def _fail_all(self, sentence: str) -> None:
        self._take_inbox()
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self._fail(sequence, sentence)
        self._set_gauges()

    def _set_gauges(self) -> None:
        self.stats.set(metrics.NUM_REQUESTS_RUNNING, len(self.scheduler.running))
        self.stats.set(metrics.NUM_REQUESTS_WAITING, len(self.scheduler.waiting))
        self.stats.set(metrics.KV_SLOTS_USED, self._target.pool.num_used, side="target")
        self._reuse.set_gauges()


def _choose_at(item: _Decoding, node: int, logits: Tensor) -> int:
    """The target's token after a tree node, with the counts of that node's own path."""
    sequence = item.sequence
    path = [n for n in item.tree.paths()[0, node].tolist() if n > 0]
    counts = sequence.counts
    if counts is not None:
        counts = counts.with_path(item.tree.tokens[0, path].tolist())
    return choose_token(logits, sequence.rule, len(sequence.tokens) + len(path), counts)
