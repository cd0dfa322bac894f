"""Which sequences are in the batch: admission in order, preemption of the newest."""

from __future__ import annotations

from collections import deque

from eagle2.engine.reuse import PrefixReuse
from eagle2.engine.sequence import Sequence
from eagle2.kv_cache.slots import SlotPool


class Scheduler:
    """Keeps ``waiting`` (oldest first) and ``running`` (in order of admission). No I/O, no tensors.

    Whoever leaves the batch leaves what was computed for them to ``reuse``.
    """

    def __init__(self, pool: SlotPool, max_sequences: int, reuse: PrefixReuse) -> None:
        self._pool, self._max_sequences, self._reuse = pool, max_sequences, reuse
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> None:
        """Move the oldest waiting sequences into the batch while there is a place and slots for all their tokens.

        All that still have to read their prompts take what has become known of them.
        """
        for sequence in self.running:
            self._reuse.take(sequence)
        promised = sum(max(sequence.num_to_prefill, 0) for sequence in self.running)
        while self.waiting and len(self.running) < self._max_sequences:
            need = self._reuse.num_to_allocate(self.waiting[0])
            if self.running and promised + need > self._pool.num_available:
                return
            sequence = self.waiting.popleft()
            self._reuse.take(sequence)
            promised += max(sequence.num_to_prefill, 0) + 1
            self.running.append(sequence)

    def plan_prefill(self, budget: int) -> list[tuple[Sequence, int]]:
        """How many prompt tokens of which sequence this step takes: oldest first, ``budget`` in all."""
        plan: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            count = min(sequence.num_to_prefill, budget)
            if count > 0 and not self._reuse.is_coming(sequence, count, plan):
                plan.append((sequence, count))
                budget -= count
        return plan

    def preempt_newest(self) -> Sequence | None:
        """Take the newest sequence out of the batch, back to the head of the queue; its slots can be had then.

        What is gone of it by then is computed again later, token for token the same. None when it is the only one.
        """
        if len(self.running) < 2:
            return None
        sequence = self.running.pop()
        self._reuse.keep(sequence)
        sequence.table.free()
        sequence.looked_up = -1
        self.waiting.appendleft(sequence)
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
        assert all(len(sequence.table) == 0 for sequence in self.waiting), "a waiting sequence holds slots"
        self._reuse.check_integrity()
        self._pool.check_integrity([self._reuse.slots, *(sequence.table.slots for sequence in self.running)])
