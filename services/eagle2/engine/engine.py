"""The cycle loop: one thread that drafts, verifies and commits for all sequences of the batch, step after step."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from eagle2.config import Overlap
from eagle2.engine.allocation import Allocation
from eagle2.engine.briefing import Briefing
from eagle2.engine.budget import AdaptiveBudget
from eagle2.engine.choice import AdaptiveTrees, FixedTrees
from eagle2.engine.cohorts import Cohorts
from eagle2.engine.departures import Departures
from eagle2.engine.drafting import Drafting
from eagle2.engine.overlap import OverlapChoice
from eagle2.engine.pace import PromptPace
from eagle2.engine.pair import Pair
from eagle2.engine.reuse import PrefixReuse
from eagle2.engine.scheduler import Scheduler
from eagle2.engine.sequence import Sequence, Sink, rule_of
from eagle2.engine.target import TargetRunner
from eagle2.engine.verification import Verification
from eagle2.kv_cache.slots import SlotTable
from eagle2.models.target import TargetModel
from eagle2.protocol import ErrorCode, GenerationRequest
from eagle2.speculative.draft import TreeShape
from eagle2.speculative.sampling import TokenCounts
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.text.detokenizer import TextStream
from eagle2.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """max_model_len: prompt and output together, in tokens. prefill_chunk: prompt tokens that one step takes at most.
    prefix_cache: whether what was read is kept for later requests. max_token_gap_s: how long a step that reads prompts
    should keep others from their next tokens at most; None for no bound."""

    max_model_len: int
    max_sequences: int
    prefill_chunk: int
    prefix_cache: bool = True
    max_token_gap_s: float | None = None


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
        overlap: Overlap = "off",
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        """``shape``: every tree's, and without a ``budget`` no other. ``overlap``: whether the proposer drafts for one
        half of the batch while the other one is verified. ``clock``: seconds, for what a step costs. ``wall_clock``:
        Unix time, for deadlines."""
        self._target, self._tokenizer, self._pair, self.stats = target, tokenizer, pair, stats
        self._limits, self._eos = limits, eos_token_ids
        self._trees = FixedTrees(shape)
        if budget is not None:
            self._trees = AdaptiveTrees(budget, stats, limits.max_sequences, clock=clock)
        self._on_thread_start = on_thread_start
        self._reuse = PrefixReuse(target.pool, stats, enabled=limits.prefix_cache)
        self.scheduler = Scheduler(target.pool, limits.max_sequences, self._reuse)
        self.departures = Departures(self.scheduler, pair, self._reuse, stats, wall_clock=wall_clock)
        self._clock = clock
        self._pace = PromptPace(limits.prefill_chunk, limits.max_token_gap_s)
        briefing = Briefing(
            target,
            pair,
            stats,
            max_depth=shape.depth,
            max_model_len=limits.max_model_len,
            prefix_cache=limits.prefix_cache,
        )
        drafting = Drafting(
            pair,
            briefing,
            self._trees,
            stats,
            vocab_size=target.model.config.vocab_size,
            pace=self._pace,
            clock=clock,
        )
        self._cohorts = Cohorts(drafting, OverlapChoice(overlap), stats, clock=clock)
        self._allocation = Allocation(target.pool, self.scheduler, self.departures, self._pace)
        self._verification = Verification(
            target, self._trees, self._pace, self._reuse, self.departures, stats, clock=clock
        )
        self._ids = itertools.count(1)
        self._inbox: deque[Sequence] = deque()
        self._work = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.turns = 0  # only grows, also while idle: whoever sees it stand still for long sees an engine that hangs
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
            if self.failure is None:
                self._fail_all("The engine has stopped.", "verifier_stopped")
            else:
                self._fail_all("The engine has failed.", "verifier_failed")

    def step(self) -> bool:
        """One cycle for the whole batch, or for one half of it. False when there was nothing to do."""
        self.turns += 1
        self._take_inbox()
        self.departures.end_overdue()
        for victim in self.scheduler.admit():
            self.departures.put_back(victim)
        self._pair.poll()
        if not self.scheduler.running:
            self._cohorts.idle()
            self._pair.flush()
            self._trees.idle(self._pair, self._target)
            self._set_gauges()
            return False
        began = self._clock()
        decoding = self._allocation.trees(self._cohorts.turn(self.scheduler.running))
        turns = self._cohorts.turns
        prefilling = self._allocation.prompts(decoding, turns)
        decoding, prefilling = self._allocation.still_there(decoding, prefilling)
        spans = [(len(sequence.table) - count, count) for sequence, count in prefilling]
        self._verification.verify(decoding, prefilling, is_alone=turns == 1)
        self._cohorts.verified(has_prefill=bool(prefilling))
        self._pace.observe(self._clock() - began, spans, is_decoding=bool(decoding))
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

    def _fail_all(self, sentence: str, code: ErrorCode) -> None:
        self._take_inbox()
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.departures.fail(sequence, sentence, code)
        self._set_gauges()

    def _set_gauges(self) -> None:
        self.stats.set(metrics.NUM_REQUESTS_RUNNING, len(self.scheduler.running))
        self.stats.set(metrics.NUM_REQUESTS_WAITING, len(self.scheduler.waiting))
        self.stats.set(metrics.KV_SLOTS_USED, self._target.pool.num_used, side="target")
        self._reuse.set_gauges()
