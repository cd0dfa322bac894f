"""The only long queue: who may use the fleet now, who waits, and who is told to come back later."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from eagle2.config import AdmissionSettings
from eagle2.protocol.generation import Priority, Usage
from eagle2.router.load import Capacity
from eagle2.router.work import WorkEstimate
from eagle2.telemetry.recorder import Recorder


class Place:
    """One admitted request. It is held over all attempts, so a retry never waits in the queue again."""

    def finished(self, usage: Usage, max_tokens: int) -> None:
        """Say what the answer took, before the release: the estimates learn from it, and its tenant is charged that."""
        raise NotImplementedError

    def release(self) -> None:
        """Give the place back; again does nothing."""
        raise NotImplementedError


class Admission:
    """A bounded queue with two classes and a fair share for every tenant, counted in estimated work.

    ``capacity`` is asked at every change and every ``poll_s`` while somebody waits, since a fleet changes without
    notice. ``clock`` is Unix time, as deadlines are. One event loop uses it.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        capacity: Callable[[], Capacity],
        work: WorkEstimate,
        recorder: Recorder,
        *,
        clock: Callable[[], float],
        poll_s: float = 0.2,
    ) -> None:
        raise NotImplementedError

    async def acquire(self, tenant: str, priority: Priority, work: float, deadline: float | None = None) -> Place:
        """A place in the fleet for ``work`` cycles; waits for it.

        Raises ``OverloadedError`` (429) when the queue is full or the wait too long, ``GenerationError`` with
        ``deadline_exceeded`` (504) when ``deadline`` (Unix time) passes first, and ``UnavailableError`` (503)
        when no replica is ready. Cancelling it leaves no trace.
        """
        raise NotImplementedError

    @asynccontextmanager
    async def place(
        self, tenant: str, priority: Priority, work: float, deadline: float | None = None
    ) -> AsyncIterator[Place]:
        """``acquire``, and the release at the end of the block."""
        place = await self.acquire(tenant, priority, work, deadline)
        try:
            yield place
        finally:
            place.release()

    def refresh(self) -> None:
        """Look at the fleet again; whoever learns of a change calls this to save up to ``poll_s``."""
        raise NotImplementedError

    def expected_wait_s(self) -> float:
        """What an interactive request of a new tenant would wait now."""
        raise NotImplementedError

    def queued_seconds(self) -> float:
        """How long one place of the fleet would be busy with everything that waits: what autoscaling feeds on."""
        raise NotImplementedError

    def in_flight_seconds(self) -> float:
        """The same for what is admitted, by its estimates."""
        raise NotImplementedError
