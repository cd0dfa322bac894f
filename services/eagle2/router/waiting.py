"""Requests that wait for a place: interactive ones first, batch requests with a share of their own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from eagle2.protocol.generation import Priority
from eagle2.router.fair_queue import FairQueue


@dataclass(eq=False, slots=True)
class Waiter:
    """One request in the queue. ``since`` and ``granted_at`` are Unix times; ``admitted`` ends its wait."""

    tenant: str
    priority: Priority
    work: float
    since: float
    admitted: asyncio.Future[None]
    granted_at: float | None = None

    def admit(self, now: float) -> None:
        """Give it a place; one that was cancelled meanwhile finds it when it wakes up."""
        self.granted_at = now
        if not self.admitted.done():
            self.admitted.set_result(None)

    def refuse(self, error: Exception) -> None:
        """End its wait with an error."""
        if not self.admitted.done():
            self.admitted.set_exception(error)
            self.admitted.exception()  # nobody reads it where the waiter is cancelled in the same moment


class WaitingRoom:
    """Two fair queues. While both have somebody, ``batch_share`` of the work that starts is of batch requests."""

    def __init__(self, batch_share: float) -> None:
        self._queues: dict[Priority, FairQueue[Waiter]] = {"interactive": FairQueue(), "batch": FairQueue()}
        self._batch_for_interactive = batch_share / (1 - batch_share)
        self._batch_credit = 0.0

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def work(self) -> float:
        """Of everybody who waits, in cycles."""
        return sum(queue.work for queue in self._queues.values())

    def counts(self) -> dict[Priority, int]:
        """How many wait."""
        return {priority: len(queue) for priority, queue in self._queues.items()}

    def enter(self, waiter: Waiter) -> None:
        """Let somebody wait."""
        self._queues[waiter.priority].push(waiter.tenant, waiter, waiter.work)

    def leave(self, waiter: Waiter) -> None:
        """Somebody waits no longer, if he did."""
        self._queues[waiter.priority].remove(waiter)

    def next(self) -> Waiter:
        """Whose turn it is; ``settle`` must follow at the end. Somebody must wait."""
        interactive, batch = self._queues["interactive"], self._queues["batch"]
        work, batch_work = interactive.peek_work(), batch.peek_work()
        if work is None or batch_work is None:
            self._batch_credit = 0.0
            return (interactive if batch_work is None else batch).pop()
        if self._batch_credit >= batch_work:
            self._batch_credit -= batch_work
            return batch.pop()
        self._batch_credit += work * self._batch_for_interactive
        return interactive.pop()

    def settle(self, waiter: Waiter, taken: float) -> None:
        """Somebody who had his turn has ended, after ``taken`` cycles."""
        self._queues[waiter.priority].settle(waiter.tenant, waiter.work, taken)

    def empty(self) -> list[Waiter]:
        """Send everybody away. Returns them."""
        left = [waiter for queue in self._queues.values() for waiter in queue.items()]
        for waiter in left:
            self.leave(waiter)
        return left

    def work_ahead(self, tenant: str, priority: Priority, work: float = 0.0) -> float:
        """Cycles that start before a new request of this tenant with so much ``work`` would."""
        interactive, batch = self._queues["interactive"], self._queues["batch"]
        if priority == "interactive":
            ahead = interactive.work_ahead(tenant)
            return ahead + min(batch.work, ahead * self._batch_for_interactive)
        ahead = batch.work_ahead(tenant)
        return ahead + min(interactive.work, (ahead + work) / self._batch_for_interactive)

    def displaced_by(self, newcomer: Waiter) -> Waiter | None:
        """Who goes when the queue is full: the newest of the tenant of whom most wait, batch requests before others.

        None when nobody has a lesser claim than the newcomer.
        """
        if newcomer.priority == "interactive":
            batch = self._queues["batch"].newest_of_longest()
            if batch is not None:
                return batch[1]
        queue = self._queues[newcomer.priority]
        longest = queue.newest_of_longest()
        if longest is None or queue.waiting(longest[0]) <= queue.waiting(newcomer.tenant) + 1:
            return None
        return longest[1]
