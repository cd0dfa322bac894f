"""Where the next attempt of a request goes: what is known of the fleet, the session and the crashes, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from eagle2.config import RoutingSettings
from eagle2.protocol import Fleet, Replica
from eagle2.router.affinity import Choice, choose, owner_of
from eagle2.router.cooldown import Cooldown
from eagle2.router.leases import ProbationLeases
from eagle2.router.load import InFlight
from eagle2.router.probation import Probation, Trial
from eagle2.session.session import Session
from eagle2.session.store import Owner, Placement, SessionStore, StoreError
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Route:
    """The conversation of a request, and its prefixes' fingerprints, short to long (``eagle2.session.session``)."""

    session: Session | None = None
    prefixes: tuple[str, ...] = ()


class Destinations:
    """Chooses replicas, and tells the store who owns a session now. The store may fail at any time: then without."""

    def __init__(
        self,
        fleet: Fleet,
        store: SessionStore,
        in_flight: InFlight,
        probation: Probation,
        cooldown: Cooldown,
        settings: RoutingSettings,
        recorder: Recorder,
        *,
        clock: Callable[[], float],
        poll_s: float = 0.02,
    ) -> None:
        """``clock``: monotonic. ``poll_s``: the fleet is looked at so often while there is nowhere to go."""
        self._fleet, self._store, self._in_flight = fleet, store, in_flight
        self._probation, self._cooldown = probation, cooldown
        self._settings, self._recorder = settings, recorder
        self._clock, self._poll_s = clock, poll_s
        self._leases = ProbationLeases(store, lasts_s=2 * settings.progress_timeout_s, clock=clock)
        self._freed = asyncio.Event()
        self._line: dict[str, frozenset[str]] = {}  # who looks for a replica, and what each excludes
        self._notes: set[asyncio.Task[None]] = set()

    async def find(
        self, request_id: str, route: Route, excluded: Collection[str], *, wait_s: float
    ) -> tuple[Replica, Trial] | None:
        """A replica, and the request's trial there. ``excluded``: incarnations. None when ``wait_s`` passes in vain."""
        limit = self._clock() + wait_s
        self._line[request_id] = frozenset(excluded)
        try:
            while True:
                # Seen before the replicas are: whatever is freed from here on is noticed.
                freed = self._freed
                if self._has_turn(request_id) and self._open_to(request_id, excluded):
                    found = await self._choose(request_id, route, excluded)
                    if found is not None:
                        return found
                left = limit - self._clock()
                if left <= 0:
                    return None
                try:
                    async with asyncio.timeout(min(left, self._poll_s)):
                        await freed.wait()
                except TimeoutError:
                    continue
        finally:
            del self._line[request_id]
            self._wake()

    def freed(self, request_id: str) -> None:
        """The request is on probation nowhere: somebody who waits may have somewhere to go now."""
        self._leases.give_back(request_id)
        self._wake()

    def _wake(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()

    def _has_turn(self, request_id: str) -> bool:
        """Suspects go one after another, first come first, past those that have nowhere to go at all."""
        if not self._probation.is_suspect(request_id):
            return True
        for other, excluded in self._line.items():
            if other == request_id:
                return True
            if self._probation.is_suspect(other) and self._up(excluded):
                return False
        raise AssertionError("whoever asks stands in the line")

    def holds(self, route: Route, replica: Replica) -> None:
        """The replica has read the prompt: tell the store, while the answer goes on."""
        if route.prefixes and self._settings.affinity == "session":
            note = asyncio.create_task(self._hold(route.prefixes, owner_of(replica)))
            self._notes.add(note)
            note.add_done_callback(self._notes.discard)

    async def _hold(self, prefixes: tuple[str, ...], owner: Owner) -> None:
        try:
            await self._store.hold(prefixes, owner)
        except StoreError:
            return

    def _open_to(self, request_id: str, excluded: Collection[str]) -> list[Replica]:
        may_start = self._probation.may_start
        return [replica for replica in self._up(excluded) if may_start(request_id, replica.incarnation)]

    def _up(self, excluded: Collection[str]) -> list[Replica]:
        return [
            replica
            for replica in self._fleet.replicas()
            if replica.incarnation not in excluded and not self._cooldown.keeps_away(replica)
        ]

    async def _choose(self, request_id: str, route: Route, excluded: Collection[str]) -> tuple[Replica, Trial] | None:
        placement = await self._lookup(route)
        taken: set[str] = set()  # another router has a suspect there
        while True:
            choice = choose(
                self._worth_a_trial(request_id, excluded, taken, placement),
                placement,
                own_loads=self._in_flight.counts(),
                excluded=(),
                session=None if route.session is None or route.session.is_opening else route.session.name,
                request_id=request_id,
                settings=self._settings,
            )
            if choice is not None and placement is not None:
                choice = await self._claimed(choice, placement, request_id, route, {*excluded, *taken})
            if choice is None:
                return None
            incarnation = choice.replica.incarnation
            if not self._probation.is_suspect(request_id) or await self._leases.take(request_id, incarnation):
                break
            taken.add(incarnation)
        # Other requests went on while the store was asked.
        if choice.replica not in self._open_to(request_id, excluded):
            self._leases.give_back(request_id)
            return None
        self._recorder.add(metrics.PLACEMENTS, reason=choice.reason)
        return choice.replica, self._probation.start(request_id, incarnation)

    def _worth_a_trial(
        self, request_id: str, excluded: Collection[str], taken: Collection[str], placement: Placement | None
    ) -> list[Replica]:
        """Where the request may go now. A suspect rather waits for another's probation to end, which takes two commits,
        than for a place on a replica that is full, which takes a whole answer."""
        candidates = self._open_to(request_id, {*excluded, *taken})
        if not self._probation.is_suspect(request_id):
            return candidates
        roomy = [replica for replica in self._up(excluded) if self._has_room(replica, placement)]
        return [replica for replica in candidates if replica in roomy] if roomy else candidates

    async def _lookup(self, route: Route) -> Placement | None:
        try:
            # A conversation that begins goes where there is room, whoever has begun another one with the same words.
            name = None if route.session is None or route.session.is_opening else route.session.name
            placement = await self._store.lookup(name, route.prefixes)
        except StoreError:
            return None
        self._in_flight.heard(placement)
        return placement

    async def _claimed(
        self, choice: Choice, placement: Placement, request_id: str, route: Route, excluded: Collection[str]
    ) -> Choice:
        """The choice, or the owner that another router has given the session meanwhile."""
        # A session whose owner is only too busy stays its own: the KV cache is there.
        session = route.session
        if session is None or choice.reason in ("owner", "spill", "random"):
            return choice
        candidate = owner_of(choice.replica)
        try:
            if session.is_opening:
                await self._store.move(session.name, candidate)
                return choice
            winner = await self._store.claim(session.name, candidate, instead_of=placement.owner)
        except StoreError:
            return choice
        if winner == candidate:
            return choice
        for replica in self._open_to(request_id, excluded):
            if owner_of(replica) == winner and self._has_room(replica, placement):
                return Choice(replica, "owner")
        return Choice(choice.replica, "spill")

    def _has_room(self, replica: Replica, placement: Placement | None) -> bool:
        others = placement.loads.get(replica.uid, 0) if placement is not None else 0
        return self._in_flight.counts().get(replica.uid, 0) + others < replica.max_sequences
