"""Which sequences are in the batch: admission and preemption by rank, and who reads how much of a prompt."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from eagle2.engine.pace import Allowance
from eagle2.engine.reuse import PrefixReuse
from eagle2.engine.sequence import Sequence
from eagle2.kv_cache.slots import SlotPool

# When so many interactive requests came in while batch ones waited, the oldest batch one is promoted; at most this
# part of the places, one at least, is in the hands of promoted ones at a time.
_PASSED_OVER = 3
_PROMOTED_SHARE = 0.25

_rank = attrgetter("rank")


class Scheduler:
    """Keeps ``waiting`` and ``running``, both in the order of rank: interactive before batch, then by age.

    One order serves everything: the first waiting sequence is admitted next, the first running one gets prompt tokens
    and slots first, and the last running one is preempted first. A waiting interactive sequence takes the place and the
    slots of running batch ones. So that batch requests are not passed over for ever, the oldest of them is promoted now
    and then, and ranks among the interactive ones from there on, by its age. The oldest running one is never preempted
    and ends, so everybody does.

    No I/O, no clock, no tensors. Whoever leaves the batch leaves what was computed for them to ``reuse``.
    """

    def __init__(self, pool: SlotPool, max_sequences: int, reuse: PrefixReuse) -> None:
        self._pool, self._max_sequences, self._reuse = pool, max_sequences, reuse
        self._most_promoted = max(1, int(_PROMOTED_SHARE * max_sequences))
        self._num_passed = 0  # admissions since the last promotion that left batch requests waiting
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into the batch, first in rank first, while there are places and slots for all their
        tokens. None overtakes one that does not fit yet. Returns those that were preempted for them.

        All that still have to read their prompts take what has become known of them.
        """
        for sequence in self.running:
            self._reuse.take(sequence)
        preempted, num_interactive = [], 0
        while self.waiting:
            head = self.waiting[0]
            while not self._has_room_for(head) and self._can_make_room_for(head):
                preempted.append(self._preempt_last())
            if not self._has_room_for(head):
                break
            self.waiting.pop(0)
            self._reuse.take(head)
            insort(self.running, head, key=_rank)
            num_interactive += head.request.priority == "interactive"
        self._promote(num_interactive)
        return preempted

    def _has_room_for(self, head: Sequence) -> bool:
        if len(self.running) >= self._max_sequences:
            return False
        # The only one gets in whatever it needs: if the pool cannot hold it, it is told so when slots run out.
        return (
            not self.running or _promised(self.running) + self._reuse.num_to_allocate(head) <= self._pool.num_available
        )

    def _can_make_room_for(self, head: Sequence) -> bool:
        """Whether ``head`` would get in if the batch sequences that run were gone. A promoted one preempts nobody:
        those of its class that run are older."""
        others = [sequence for sequence in self.running if sequence.is_deferrable]
        if head.request.priority != "interactive" or not others:
            return False
        stay = self.running[: len(self.running) - len(others)]
        freed = sum(len(sequence.table) for sequence in others)  # at most: slots may be shared
        need = _promised(stay) + self._reuse.num_to_allocate(head)
        return not stay or need <= self._pool.num_available + freed

    def _promote(self, num_admitted: int) -> None:
        """Count interactive requests that came in while batch ones still wait, and promote the oldest of these when it
        is their turn.

        A running one may be the oldest: it can then no longer be preempted for a waiting one.
        """
        if not num_admitted or not self.waiting or not self.waiting[-1].is_deferrable:
            return
        self._num_passed += num_admitted
        promoted = sum(sequence.promoted for sequence in [*self.running, *self.waiting])
        if self._num_passed < _PASSED_OVER or promoted >= self._most_promoted:
            return
        self._num_passed = 0
        deferrable = [sequence for sequence in [*self.running, *self.waiting] if sequence.is_deferrable]
        min(deferrable, key=_rank).promoted = True
        self.running.sort(key=_rank)
        self.waiting.sort(key=_rank)

    def plan_prefill(self, allowance: Allowance) -> list[tuple[Sequence, int]]:
        """How many prompt tokens of which sequence this step takes, as far as ``allowance`` goes."""
        plan: list[tuple[Sequence, int]] = []
        for sequence in self._reading(allowance):
            start = len(sequence.table)
            count = allowance.fit(start, sequence.num_to_prefill)
            if count > 0 and not self._reuse.is_coming(sequence, count, plan):
                plan.append((sequence, count))
                allowance.take(start, count)
        return plan

    def _reading(self, allowance: Allowance) -> list[Sequence]:
        """Those that read, in the order in which they do: first in rank first, and one prompt after the other. Shared
        between them, all would get their first token as late as the last one.

        But while the first one needs more than this step, one prompt of its class that takes at most half of the step
        goes before it: a question need not wait for a document, which is read at half speed at the least.
        """
        reading = [sequence for sequence in self.running if sequence.num_to_prefill > 0]
        if not reading:
            return []
        first = reading[0]
        most = allowance.fit(len(first.table), allowance.tokens)
        if first.num_to_prefill > most:
            for sequence in reading:
                if sequence.num_to_prefill <= most // 2 and sequence.is_deferrable == first.is_deferrable:
                    reading.remove(sequence)
                    return [sequence, *reading]
        return reading

    def preempt_newest(self) -> Sequence | None:
        """Take the newest sequence of the lowest class out of the batch and back to the queue; its
        slots can be had then.

        What is gone of it by then is computed again later, token for token the same. None when it is the only one.
        """
        return self._preempt_last() if len(self.running) > 1 else None

    def _preempt_last(self) -> Sequence:
        sequence = self.running.pop()
        self._reuse.keep(sequence)
        sequence.table.free()
        sequence.looked_up = -1
        self.add(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give up its slots."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._reuse.keep(sequence)
        sequence.table.free()

    def check_integrity(self) -> None:
        assert len(self.running) <= self._max_sequences, f"{len(self.running)} sequences run"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank), "sequences are not in the order of rank"
        assert all(len(sequence.table) == 0 for sequence in self.waiting), "a waiting sequence holds slots"
        self._reuse.check_integrity()
        self._pool.check_integrity([self._reuse.slots, *(sequence.table.slots for sequence in self.running)])


def _promised(running: list[Sequence]) -> int:
    """Slots that sequences still need until they decode: the rest of their prompts, and a root."""
    return sum(sequence.num_to_prefill + 1 for sequence in running if sequence.num_to_prefill > 0)
