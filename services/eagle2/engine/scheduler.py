"""Which sequences are in the batch: admission in order, preemption of the newest."""

from __future__ import annotations

from collections import deque

from eagle2.engine.sequence import Sequence
from eagle2.kv_cache.slots import SlotPool


class Scheduler:
    """Keeps ``waiting`` (oldest first) and ``running`` (in order of admission). No I/O, no tensors."""

    def __init__(self, pool: SlotPool, max_sequences: int) -> None:
        self._pool, self._max_sequences = pool, max_sequences
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> None:
        """Move the oldest waiting sequences into the batch while there is a place and slots for all their tokens."""
        promised = sum(max(sequence.num_to_prefill, 0) for sequence in self.running)
        while self.waiting and len(self.running) < self._max_sequences:
            need = len(self.waiting[0].tokens) + 1
            if self.running and promised + need > self._pool.num_free:
                return
            promised += need
            self.running.append(self.waiting.popleft())

    def plan_prefill(self, budget: int) -> list[tuple[Sequence, int]]:
        """How many prompt tokens of which sequence this step takes: oldest first, ``budget`` in all."""
        plan = []
        for sequence in self.running:
            count = min(sequence.num_to_prefill, budget)
            if count > 0:
                plan.append((sequence, count))
                budget -= count
        return plan

    def preempt_newest(self) -> Sequence | None:
        """Take the newest sequence out of the batch, back to the head of the queue; its slots are free then.

        It is computed again later, token for token the same. None when it is the only one.
        """
        if len(self.running) < 2:
            return None
        sequence = self.running.pop()
        sequence.table.free()
        self.waiting.appendleft(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its slots."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.table.free()

    def check_integrity(self) -> None:
        assert all(len(sequence.table) == 0 for sequence in self.waiting), "a waiting sequence holds slots"
        self._pool.check_integrity(sequence.table.slots for sequence in self.running)
