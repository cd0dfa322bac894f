"""The only long queue: who may use the fleet now, who waits, and who is told to come back later."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from eagle2.autoscaling.policy import IN_FLIGHT, QUEUED_SECONDS
from eagle2.config import AdmissionSettings
from eagle2.errors import OverloadedError, UnavailableError
from eagle2.protocol.generation import Priority, Usage
from eagle2.router.failures import GenerationError
from eagle2.router.load import Capacity
from eagle2.router.waiting import Waiter, WaitingRoom
from eagle2.router.work import WorkEstimate
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

_NEVER = -math.inf


class Place:
    """One admitted request. It is held over all attempts, so a retry never waits in the queue again."""

    def __init__(self, admission: Admission, waiter: Waiter, granted_at: float) -> None:
        self._admission = admission
        self._waiter = waiter
        self._granted_at = granted_at
        self._answer: tuple[Usage, int] | None = None
        self._released = False

    def finished(self, usage: Usage, max_tokens: int) -> None:
        """Say what the answer took, before the release: the estimates learn from it, and its tenant is charged that."""
        self._answer = usage, max_tokens

    def release(self) -> None:
        """Give the place back; again does nothing."""
        if not self._released:
            self._released = True
            self._admission._released(self._waiter, self._granted_at, self._answer)


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
        self._settings = settings
        self._ask_capacity = capacity
        self._work = work
        self._recorder = recorder
        self._clock = clock
        self._poll_s = poll_s
        self._room = WaitingRoom(settings.batch_share)
        self._capacity = Capacity(0, 0)
        self._usual_places = 1
        self._ready_until = _NEVER
        self._held = 0
        self._held_work = 0.0
        self._poll: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        """Requests that hold a place."""
        return self._held

    @property
    def queued(self) -> int:
        """Requests that wait for one."""
        return len(self._room)

    async def acquire(self, tenant: str, priority: Priority, work: float, deadline: float | None = None) -> Place:
        """A place in the fleet for ``work`` cycles; waits for it.

        Raises ``OverloadedError`` (429) when the queue is full or the wait too long, ``GenerationError`` with
        ``deadline_exceeded`` (504) when ``deadline`` (Unix time) passes first, and ``UnavailableError`` (503)
        when no replica is ready. Cancelling it leaves no trace.
        """
        now = self._clock()
        if deadline is not None and deadline <= now:
            raise self._deadline_passed()
        self.refresh()
        if self._nothing_ready(now):
            raise self._not_ready()
        waiter = Waiter(tenant, priority, work, now, asyncio.get_running_loop().create_future())
        if len(self._room) or self._held >= self._capacity.places:
            self._check_wait(waiter)
            self._check_length(waiter)
        self._room.enter(waiter)
        self.refresh()
        try:
            async with asyncio.timeout(self._patience(deadline, now)):
                await waiter.admitted
        except TimeoutError:
            self._abandon(waiter)
            if deadline is not None and deadline - now <= self._settings.max_wait_s:
                raise self._deadline_passed() from None
            waited = f"The request has waited {self._settings.max_wait_s:g} seconds for its turn."
            raise self._overloaded(waited, "expected_wait", self._wait_s(waiter)) from None
        except BaseException:
            self._abandon(waiter)
            raise
        assert waiter.granted_at is not None
        return Place(self, waiter, waiter.granted_at)

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
        now = self._clock()
        self._capacity = self._ask_capacity()
        if self._capacity.total > 0:
            self._ready_until = now
            self._usual_places = max(1, self._capacity.places)
        while len(self._room) and self._held < self._capacity.places:
            self._grant(self._room.next(), now)
        if self._nothing_ready(now):
            for waiter in self._room.empty():
                waiter.refuse(self._not_ready())
        self._keep_polling()
        self._show()

    def expected_wait_s(self) -> float:
        """What an interactive request of a new tenant would wait now; 0 until an answer has finished."""
        return self._seconds(self._room.work_ahead("", "interactive"))

    def queued_seconds(self) -> float:
        """How long one place of the fleet would be busy with everything that waits."""
        return self._work.seconds(self._room.work)

    def in_flight_seconds(self) -> float:
        """The same for what is admitted, by its estimates."""
        return self._work.seconds(self._held_work)

    def autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaling policy is told (``eagle2.autoscaling.policy``)."""
        return {IN_FLIGHT: float(self._held), QUEUED_SECONDS: self.queued_seconds()}

    # Waiting

    def _patience(self, deadline: float | None, now: float) -> float:
        longest = self._settings.max_wait_s
        return longest if deadline is None else min(longest, deadline - now)

    def _check_wait(self, waiter: Waiter) -> None:
        wait = self._wait_s(waiter)
        if wait > self._settings.max_wait_s:
            sentence = f"The request would wait about {wait:.0f} seconds, above {self._settings.max_wait_s:g}."
            raise self._overloaded(sentence, "expected_wait", wait)

    def _check_length(self, waiter: Waiter) -> None:
        """A full queue turns away the newcomer, or in its place somebody of whom more wait or who has more time."""
        if len(self._room) < self._settings.max_queued:
            return
        displaced = self._room.displaced_by(waiter)
        refusal = self._overloaded("The queue is full.", "queue_full", self._wait_s(displaced or waiter))
        if displaced is None:
            raise refusal
        self._room.leave(displaced)
        displaced.refuse(refusal)

    def _abandon(self, waiter: Waiter) -> None:
        """The waiter is gone. It may hold a place already, of which it never learned."""
        if waiter.granted_at is not None:
            self._released(waiter, waiter.granted_at, None)
        else:
            self._room.leave(waiter)
            self.refresh()

    def _nothing_ready(self, now: float) -> bool:
        return self._capacity.total <= 0 and now - self._ready_until >= self._settings.ready_grace_s

    # Places

    def _grant(self, waiter: Waiter, now: float) -> None:
        # Counted here and not when the waiter wakes up: nobody else may be given this place in between.
        self._held += 1
        self._held_work += waiter.work
        self._recorder.observe(metrics.QUEUE_SECONDS, max(0.0, now - waiter.since), priority=waiter.priority)
        waiter.admit(now)

    def _released(self, waiter: Waiter, granted_at: float, answer: tuple[Usage, int] | None) -> None:
        self._held -= 1
        self._held_work = self._held_work - waiter.work if self._held else 0.0
        seconds = max(0.0, self._clock() - granted_at)
        if answer is not None:
            taken = self._work.learn(*answer, seconds)
        else:
            taken = min(waiter.work, self._work.cycles_in(seconds))
        self._room.settle(waiter, taken)
        self.refresh()

    def _wait_s(self, waiter: Waiter) -> float:
        return self._seconds(self._room.work_ahead(waiter.tenant, waiter.priority, waiter.work))

    def _seconds(self, work_ahead: float) -> float:
        # A guess must not refuse anybody.
        return self._work.seconds(work_ahead) / self._usual_places if self._work.learned else 0.0

    # Refusals

    def _overloaded(self, sentence: str, code: str, wait_s: float) -> OverloadedError:
        self._recorder.add(metrics.REFUSALS, reason=code)
        retry_after_s = max(1.0, float(math.ceil(wait_s)))
        return OverloadedError(
            f"{sentence} Try again in {retry_after_s:.0f} seconds.", retry_after_s=retry_after_s, code="queue_full"
        )

    def _deadline_passed(self) -> GenerationError:
        self._recorder.add(metrics.REFUSALS, reason="deadline_exceeded")
        return GenerationError("The deadline passed while the request waited for its turn.", "deadline_exceeded")

    def _not_ready(self) -> UnavailableError:
        self._recorder.add(metrics.REFUSALS, reason="not_ready")
        return UnavailableError("No verifier is ready.")

    # Watching

    def _keep_polling(self) -> None:
        waiting = len(self._room) > 0
        if self._poll is not None and not waiting:
            self._poll.cancel()
            self._poll = None
        elif self._poll is None and waiting:
            self._poll = asyncio.get_running_loop().call_later(self._poll_s, self._polled)

    def _polled(self) -> None:
        self._poll = None
        self.refresh()

    def _show(self) -> None:
        recorder = self._recorder
        for priority, waiting in self._room.counts().items():
            recorder.set(metrics.QUEUE_DEPTH, waiting, priority=priority)
        recorder.set(metrics.EXPECTED_WAIT_SECONDS, self.expected_wait_s())
        recorder.set(metrics.QUEUED_WORK_SECONDS, self.queued_seconds())
        recorder.set(metrics.IN_FLIGHT_WORK_SECONDS, self.in_flight_seconds())
        recorder.set(metrics.PLACES, self._capacity.places)
        recorder.set(metrics.PLACES_HELD, self._held)
