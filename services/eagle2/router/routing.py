"""Everything of one router between a tokenised request and the fleet, wired together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from eagle2.config import AdmissionSettings, RoutingSettings
from eagle2.protocol import Fleet
from eagle2.router.admission import Admission
from eagle2.router.failover import RoutedVerifier
from eagle2.router.load import InFlight, LoadReports
from eagle2.router.work import WorkEstimate
from eagle2.session.breaker import GuardedStore
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder


class Routing:
    """Admission, placement and failover over one fleet.

    ``router``: this router's name among those that share ``store``. ``prefill_chunk``: prompt tokens that a verifier
    reads in one cycle. ``clock`` is Unix time in seconds, ``monotonic`` what its name says.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: GuardedStore,
        recorder: Recorder,
        *,
        router: str,
        routing: RoutingSettings,
        admission: AdmissionSettings,
        prefill_chunk: int,
        close_timeout_s: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet, self.store = fleet, store
        self._recorder = recorder
        in_flight, work = InFlight(clock=monotonic), WorkEstimate(prefill_chunk)
        self.admission = Admission(admission, lambda: in_flight.capacity(fleet.replicas()), work, recorder, clock=clock)
        self.verifier = RoutedVerifier(
            fleet,
            store,
            self.admission,
            in_flight,
            work,
            routing,
            recorder,
            close_timeout_s=close_timeout_s,
            clock=monotonic,
            wall_clock=clock,
        )
        self._reports = LoadReports(store, in_flight, recorder, router=router)

    def degraded(self) -> list[str]:
        """What does not work while requests are still served, in short words."""
        return ["session_store"] if self.store.is_degraded else []

    def show(self) -> None:
        """Bring the gauges up to date that nobody sets on the way."""
        self.admission.refresh()
        self._recorder.set(metrics.SESSION_STORE_UP, float(not self.store.is_degraded))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Tell other routers how busy this one keeps the replicas, while the block runs; then close the store."""
        reporting = asyncio.create_task(self._reports.run())
        try:
            yield
        finally:
            reporting.cancel()
            await asyncio.wait([reporting])
            await self.store.close()
