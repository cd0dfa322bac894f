"""One suspect on a replica, over all routers: each router knows only its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eagle2.session.hashing import framed_hash
from eagle2.session.store import Owner, SessionStore, StoreError


class ProbationLeases:
    """Leases on replicas for requests on probation, kept in the store like the owner of a session.

    A lease whose holder has not given it back after ``lasts_s`` seconds, as seen from here, is taken over: its router
    may be gone. While the store fails every router judges alone. ``clock`` is monotonic.
    """

    def __init__(self, store: SessionStore, *, lasts_s: float, clock: Callable[[], float]) -> None:
        self._store, self._lasts_s, self._clock = store, lasts_s, clock
        self._held: dict[str, tuple[str, Owner]] = {}
        self._foreign: dict[str, tuple[Owner, float]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}

    async def take(self, request: str, incarnation: str) -> bool:
        """Whether the request may be tried on that replica now."""
        name, mine = framed_hash("probation", incarnation), Owner("probation", request)
        ending = self._ending.get(name)
        if ending is not None:
            await asyncio.wait({ending})  # this router's last one there: as long as the store takes for two answers
        try:
            holder = await self._store.claim(name, mine)
            if holder != mine:
                since = self._since(name, holder)
                if self._clock() - since <= self._lasts_s:
                    return False
                holder = await self._store.claim(name, mine, instead_of=holder)
        except StoreError:
            return True
        self._foreign.pop(name, None)
        if holder != mine:
            return False
        self._held[request] = name, mine
        return True

    def give_back(self, request: str) -> None:
        """The request is no longer on probation there; does nothing for one without a lease."""
        held = self._held.pop(request, None)
        if held is not None:
            name, _ = held
            ending = self._ending[name] = asyncio.create_task(self._drop(*held))
            ending.add_done_callback(lambda done: self._ended(name, done))

    def _since(self, name: str, holder: Owner) -> float:
        """When this holder was first seen."""
        known = self._foreign.get(name)
        if known is None or known[0] != holder:
            known = self._foreign[name] = holder, self._clock()
        return known[1]

    def _ended(self, name: str, done: asyncio.Task[None]) -> None:
        if self._ending.get(name) is done:
            del self._ending[name]

    async def _drop(self, name: str, mine: Owner) -> None:
        try:
            entry = await self._store.session(name)
            if entry is not None and entry.owner == mine:
                await self._store.drop(name)
        except StoreError:
            return  # taken over by whoever needs it
