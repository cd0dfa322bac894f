"""How sequences leave the batch: at their end, in an error, given up by their reader, put back for want of slots."""

from __future__ import annotations

import time
from collections.abc import Callable

from eagle2.engine.pair import Pair
from eagle2.engine.reuse import PrefixReuse
from eagle2.engine.scheduler import Scheduler
from eagle2.engine.sequence import Sequence
from eagle2.protocol import ErrorCode
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder


class Departures:
    """Whoever leaves gives up its slots on both sides. What is known of its tokens stays for later ones.

    ``wall_clock``: Unix time in seconds, for deadlines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pair: Pair,
        reuse: PrefixReuse,
        stats: Recorder,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler, self._pair, self._reuse, self._stats = scheduler, pair, reuse, stats
        self._wall_clock = wall_clock

    def retire(self, sequence: Sequence) -> None:
        """Free the slots of a sequence that has ended."""
        self._scheduler.remove(sequence)
        if sequence.pairing == self._pair.pairing and self._pair.is_up:
            self._pair.forget(sequence.id)

    def finish(self, sequence: Sequence) -> None:
        """Of its own: the stream has its last item already."""
        assert sequence.finish_reason is not None
        self._stats.add(metrics.REQUEST_SUCCESS, finished_reason=sequence.finish_reason)
        self.retire(sequence)

    def fail(self, sequence: Sequence, sentence: str, code: ErrorCode = "generation_failed") -> None:
        sequence.fail(sentence, code)
        self._stats.add(metrics.NUM_REQUESTS_FAILED)
        self.retire(sequence)

    def fail_unsound(self, sequence: Sequence, sentence: str) -> None:
        """The model's output is not a number: nothing that was computed is kept for others."""
        self.fail(sequence, sentence)
        self._reuse.clear()

    def end_overdue(self) -> None:
        """Sequences whose reader has left or whose deadline has passed."""
        now = self._wall_clock()
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            deadline = sequence.request.deadline
            if sequence.cancelled:
                sequence.finish_reason = "error"
                self._stats.add(metrics.NUM_REQUESTS_ABORTED)
                self.retire(sequence)
            elif deadline is not None and now > deadline:
                sentence = f"The deadline passed after {sequence.num_output} tokens of the answer."
                self.fail(sequence, sentence, "deadline_exceeded")

    def preempt(self) -> Sequence | None:
        """Put the newest sequence back into the queue. None when it is the only one."""
        victim = self._scheduler.preempt_newest()
        if victim is not None:
            self.put_back(victim)
        return victim

    def put_back(self, victim: Sequence) -> None:
        """The scheduler has put a sequence back into the queue: the proposer frees it too."""
        self._stats.add(metrics.NUM_PREEMPTIONS)
        self._pair.forget(victim.id)
        victim.held, victim.is_opened = 0, False
        victim.cycle += 1  # an answer may be on its way: it tells of rows that the proposer is about to free
