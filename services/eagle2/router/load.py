"""How busy the replicas are: what this router has in flight, and what the other routers say of themselves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from eagle2.protocol.fleet import Replica
from eagle2.session.store import Placement, SessionStore, StoreError
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

_LEASE_INTERVALS = 3  # two reports may be late or lost before the others forget


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sequences that the fleet decodes at once, and how many of them this router may have in flight."""

    total: int
    places: int


class InFlight:
    """Sequences in flight by replica uid: this router's own, and what was last heard of the others.

    What was heard counts for ``trust_s`` seconds. ``clock`` is monotonic.
    """

    def __init__(self, *, clock: Callable[[], float], trust_s: float = 5.0) -> None:
        self._clock = clock
        self._trust_s = trust_s
        self._own: Counter[str] = Counter()
        self._heard = Placement()
        self._heard_at = -trust_s

    @contextmanager
    def at(self, uid: str) -> Iterator[None]:
        """Count one sequence at a replica while the block runs."""
        self._own[uid] += 1
        try:
            yield
        finally:
            self._own[uid] -= 1
            if not self._own[uid]:
                del self._own[uid]

    def counts(self) -> dict[str, int]:
        """This router's own, by uid; replicas without any are left out."""
        return dict(self._own)

    def heard(self, placement: Placement) -> None:
        """Remember what the other routers have in flight."""
        self._heard = placement
        self._heard_at = self._clock()

    def capacity(self, replicas: Sequence[Replica]) -> Capacity:
        """The fleet as this router may use it: what others leave, and an equal share of all in any case.

        The share lets a router that comes late have places beside one that has them all; until that one has given back
        what is above its own share, verifiers queue the difference. The same happens while nothing is heard.
        """
        total = sum(replica.max_sequences for replica in replicas)
        if self._clock() - self._heard_at > self._trust_s:
            return Capacity(total, total)
        others = sum(max(0, self._heard.loads.get(replica.uid, 0)) for replica in replicas)
        share = -(-total // (1 + max(0, self._heard.routers)))
        return Capacity(total, max(total - others, share))


class LoadReports:
    """Tells the store every ``interval_s`` what this router has in flight, as a lease of three intervals.

    The same trip brings back what the others said. A store that fails costs nothing but the news.
    """

    def __init__(
        self,
        store: SessionStore,
        in_flight: InFlight,
        recorder: Recorder,
        *,
        router: str,
        interval_s: float = 1.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._in_flight = in_flight
        self._recorder = recorder
        self._router = router
        self._interval_s = interval_s
        self._sleep = sleep

    async def run(self) -> None:
        """Report until cancelled; then take the report back, as far as the store lets."""
        try:
            while True:
                await self.report()
                await self._sleep(self._interval_s)
        finally:
            await self._tell({})

    async def report(self) -> None:
        """Report once and listen once. A store that fails is counted, and raises nothing."""
        if await self._tell(self._in_flight.counts()):
            try:
                self._in_flight.heard(await self._store.lookup(None, ()))
            except StoreError:
                self._recorder.add(metrics.LOAD_REPORTS_FAILED)

    async def _tell(self, counts: dict[str, int]) -> bool:
        try:
            await self._store.report(self._router, counts, _LEASE_INTERVALS * self._interval_s)
        except StoreError:
            self._recorder.add(metrics.LOAD_REPORTS_FAILED)
            return False
        return True
