"""Slots for a step: those of its trees' nodes, then those of its prompt tokens."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from eagle2.engine.departures import Departures
from eagle2.engine.drafting import Decoding
from eagle2.engine.pace import PromptPace
from eagle2.engine.scheduler import Scheduler
from eagle2.engine.sequence import Sequence
from eagle2.kv_cache.slots import OutOfSlotsError, SlotPool


class Allocation:
    """Makes room where there is none: trees shrink, then the newest sequence is put back into the queue.

    ``pace``: how many prompt tokens a step takes.
    """

    def __init__(self, pool: SlotPool, scheduler: Scheduler, departures: Departures, pace: PromptPace) -> None:
        self._pool, self._scheduler, self._departures = pool, scheduler, departures
        self._pace = pace

    def trees(self, decoding: Iterable[Decoding]) -> list[Decoding]:
        """Those that got slots for all their nodes, oldest sequence first; short of slots, a tree is its root."""
        granted = []
        running = self._scheduler.running
        items = [item for item in decoding if item.sequence in running]
        if sum(item.tree.num_nodes for item in items) <= self._pool.num_available:
            self._grant(items)
            return items
        for item in items:
            if item.sequence not in running:
                continue
            while True:
                try:
                    item.slots = self._pool.allocate(item.tree.num_nodes)
                    granted.append(item)
                    break
                except OutOfSlotsError:
                    if item.tree.num_nodes > 1:
                        item.tree = item.tree.roots()
                        continue
                victim = self._departures.preempt()
                if victim is None:
                    self._fail_for_want(item.sequence)
                if victim is None or victim is item.sequence:
                    break
        return granted

    def prompts(self, decoding: SequenceOf[Decoding] = (), turns: int = 1) -> list[tuple[Sequence, int]]:
        """(sequence, count): this step's prompt tokens, as many as there are slots for; the tables have them now.

        Few enough that no reader waits for long, ``turns`` steps for each next token. Of batch requests there is none.
        """
        awaited = any(s.decodes and s.request.priority == "interactive" for s in self._scheduler.running)
        rows = max(1, sum(item.tree.num_nodes for item in decoding)) if awaited else 0
        taken = []
        for sequence, count in self._scheduler.plan_prefill(self._pace.allowance(rows, turns)):
            count = min(count, self._pool.num_available)
            if count:
                sequence.table.extend(count)
                taken.append((sequence, count))
        running = self._scheduler.running
        # Nobody decodes and nobody can go on reading: the newest makes room for the others.
        stuck = bool(running) and not taken and all(s.num_to_prefill > 0 for s in running)
        if stuck and self._departures.preempt() is None:
            self._fail_for_want(running[0])
        return taken

    def still_there(
        self, decoding: list[Decoding], prefilling: list[tuple[Sequence, int]]
    ) -> tuple[list[Decoding], list[tuple[Sequence, int]]]:
        """What is left after preemptions. One that comes after a tree got its slots takes the table; these go too."""
        running = self._scheduler.running
        for item in decoding:
            if item.sequence not in running:
                self._pool.release(item.slots)
        return (
            [item for item in decoding if item.sequence in running],
            [(sequence, count) for sequence, count in prefilling if sequence in running],
        )

    def _grant(self, items: SequenceOf[Decoding]) -> None:
        """Slots for all of them."""
        slots, end = self._pool.allocate(sum(item.tree.num_nodes for item in items)), 0
        for item in items:
            item.slots = slots[end : (end := end + item.tree.num_nodes)]

    def _fail_for_want(self, sequence: Sequence) -> None:
        self._departures.fail(sequence, f"The cache of {self._pool.num_slots} slots is too small for it.")
