"""What routers share: the owners of sessions, who holds which prefix, and how busy every replica is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Owner:
    """The replica that holds a session's KV cache, and in which of its lives (``eagle2.protocol.Replica``)."""

    replica: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Placement:
    """What is known before a request is placed.

    owner: of its session, None when nobody is. holders: for each prefix that was asked about, who holds it. loads:
    sequences in flight by replica uid, those of all *other* routers together. routers: how many others report.
    """

    owner: Owner | None = None
    holders: tuple[frozenset[Owner], ...] = ()
    loads: Mapping[str, int] = field(default_factory=dict)
    routers: int = 0


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """A session as operators see it. ``name`` is its hash; ``expires_s``: seconds until it is forgotten."""

    name: str
    owner: Owner
    expires_s: float


class SessionStore(Protocol):
    """Names of sessions and prefixes are hashes already (``eagle2.session.session``).

    Every operation raises ``StoreError`` when the store does not answer in time, refuses, or answers with nonsense;
    callers go on without it. A value that cannot be read counts as one that is not there.
    """

    async def lookup(self, session: str | None, prefixes: Sequence[str]) -> Placement:
        """Everything that placing a request needs, in one round trip. Also keeps the session alive."""
        ...

    async def claim(self, session: str, candidate: Owner, *, instead_of: Owner | None = None) -> Owner:
        """Make ``candidate`` the owner if there is none, or if that is ``instead_of``; return who is owner now.

        Atomic: of several claims at one moment one wins, and all are told who.
        """
        ...

    async def hold(self, prefixes: Sequence[str], owner: Owner) -> None:
        """``owner`` has read these prefixes."""
        ...

    async def report(self, router: str, loads: Mapping[str, int], ttl_s: float) -> None:
        """The sequences that a router has in flight, by replica uid: a lease that ends ``ttl_s`` from now."""
        ...

    async def sessions(self, limit: int = 1000, *, beginning: str = "") -> list[SessionEntry]:
        """Up to ``limit`` sessions whose names begin so, for operators."""
        ...

    async def session(self, name: str) -> SessionEntry | None: ...

    async def move(self, name: str, owner: Owner) -> None:
        """Give a session another owner, whoever has it."""
        ...

    async def drop(self, name: str) -> bool:
        """Forget a session. Whether it was known."""
        ...

    async def ping(self) -> None:
        """Raises ``StoreError`` when the store cannot be written."""
        ...

    async def close(self) -> None: ...


class StoreError(Exception):
    """The session store cannot be used now. The message is a sentence without keys or passwords."""


class StoreBusyError(StoreError):
    """This router asks the store so much at once that no connection was free in time. The store itself is well."""


class StoreTimeoutError(StoreError):
    """The session store did not answer in time; once alone that may be chance."""
