"""The session store of one process, for one router or for several that share the process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic

from eagle2.session.store import Owner, Placement, SessionEntry

MAX_HOLDERS = 8
"""Replicas that are remembered for one prefix, the newest; also in Redis."""


@dataclass
class _Contents:
    # By last use, the oldest first. Times are those at which an entry is forgotten.
    sessions: OrderedDict[str, tuple[Owner, float]] = field(default_factory=OrderedDict)
    prefixes: OrderedDict[str, dict[Owner, float]] = field(default_factory=OrderedDict)
    leases: dict[str, tuple[dict[str, int], float]] = field(default_factory=dict)


class MemorySessionStore:
    """``SessionStore`` in memory: ``max_entries`` sessions and as many prefixes at most, the least used go first.

    ``clock`` is monotonic, in seconds. ``beside`` is the store of another router in the process, to share its contents.
    """

    def __init__(
        self,
        ttl_s: float,
        *,
        clock: Callable[[], float] = monotonic,
        max_entries: int = 100_000,
        beside: MemorySessionStore | None = None,
    ) -> None:
        self._ttl_s, self._clock, self._max_entries = ttl_s, clock, max_entries
        self._contents: _Contents = beside._contents if beside is not None else _Contents()
        self._own: set[str] = set()

    async def lookup(self, session: str | None, prefixes: Sequence[str]) -> Placement:
        now = self._clock()
        owner = self._owner(session, now) if session is not None else None
        if session is not None and owner is not None:
            self._put(session, owner, now)
        holders = tuple(
            frozenset(holder for holder, end in self._contents.prefixes.get(prefix, {}).items() if end > now)
            for prefix in prefixes
        )
        self._end_leases(now)
        others = [loads for router, (loads, _) in self._contents.leases.items() if router not in self._own]
        total: dict[str, int] = {}
        for loads in others:
            for uid, count in loads.items():
                total[uid] = total.get(uid, 0) + count
        return Placement(owner, holders, total, len(others))

    async def claim(self, session: str, candidate: Owner, *, instead_of: Owner | None = None) -> Owner:
        now = self._clock()
        current = self._owner(session, now)
        winner = candidate if current is None or current == instead_of else current
        self._put(session, winner, now)
        return winner

    async def hold(self, prefixes: Sequence[str], owner: Owner) -> None:
        now = self._clock()
        for prefix in prefixes:
            held = {holder: end for holder, end in self._contents.prefixes.pop(prefix, {}).items() if end > now}
            held.pop(owner, None)
            held[owner] = now + self._ttl_s
            for oldest in list(held)[:-MAX_HOLDERS]:
                del held[oldest]
            self._contents.prefixes[prefix] = held
        self._bound(self._contents.prefixes)

    async def report(self, router: str, loads: Mapping[str, int], ttl_s: float) -> None:
        now = self._clock()
        self._own.add(router)
        self._contents.leases[router] = (dict(loads), now + ttl_s)
        self._end_leases(now)

    async def sessions(self, limit: int = 1000, *, beginning: str = "") -> list[SessionEntry]:
        now = self._clock()
        alive = (
            SessionEntry(name, owner, end - now)
            for name, (owner, end) in self._contents.sessions.items()
            if end > now and name.startswith(beginning)
        )
        return list(islice(alive, limit))

    async def session(self, name: str) -> SessionEntry | None:
        now = self._clock()
        owner = self._owner(name, now)
        return None if owner is None else SessionEntry(name, owner, self._contents.sessions[name][1] - now)

    async def move(self, name: str, owner: Owner) -> None:
        self._put(name, owner, self._clock())

    async def drop(self, name: str) -> bool:
        known = self._owner(name, self._clock()) is not None
        self._contents.sessions.pop(name, None)
        return known

    async def ping(self) -> None:
        return

    async def close(self) -> None:
        return

    def _owner(self, session: str, now: float) -> Owner | None:
        owner, end = self._contents.sessions.get(session, (None, now))
        return owner if end > now else None

    def _put(self, session: str, owner: Owner, now: float) -> None:
        self._contents.sessions[session] = (owner, now + self._ttl_s)
        self._contents.sessions.move_to_end(session)
        self._bound(self._contents.sessions)

    def _bound(self, entries: OrderedDict[str, tuple[Owner, float]] | OrderedDict[str, dict[Owner, float]]) -> None:
        while len(entries) > self._max_entries:
            entries.popitem(last=False)

    def _end_leases(self, now: float) -> None:
        for router in [router for router, (_, end) in self._contents.leases.items() if end <= now]:
            del self._contents.leases[router]
