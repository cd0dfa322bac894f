"""A session store that is left alone while it fails, so that requests do not wait for it one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from eagle2.session.store import (
    Owner,
    Placement,
    SessionEntry,
    SessionStore,
    StoreBusyError,
    StoreError,
    StoreTimeoutError,
)

MAX_TIMEOUTS = 2
T = TypeVar("T")
_log = logging.getLogger(__name__)


class GuardedStore:
    """``store``, which is not asked for anything while it is known to fail: every operation raises ``StoreError`` then.

    A refusal or a lost connection is proof at once, of answers that are late it takes two in a row, and too many
    questions at a time are no proof. From then on the
    store is tried every ``retry_s`` in the background, by a write, until that succeeds: no request waits for it.
    ``sleep`` waits so many seconds.
    """

    def __init__(
        self, store: SessionStore, retry_s: float, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._store, self._retry_s, self._sleep = store, retry_s, sleep
        self._timeouts = 0
        self._reason: str | None = None
        self._trying: asyncio.Task[None] | None = None

    @property
    def is_degraded(self) -> bool:
        """Whether requests are placed without the store now."""
        return self._reason is not None

    @property
    def degraded_reason(self) -> str | None:
        """A sentence that says why, without keys or passwords; None while the store is used."""
        return self._reason

    async def lookup(self, session: str | None, prefixes: Sequence[str]) -> Placement:
        return await self._ask(lambda: self._store.lookup(session, prefixes))

    async def claim(self, session: str, candidate: Owner, *, instead_of: Owner | None = None) -> Owner:
        return await self._ask(lambda: self._store.claim(session, candidate, instead_of=instead_of))

    async def hold(self, prefixes: Sequence[str], owner: Owner) -> None:
        await self._ask(lambda: self._store.hold(prefixes, owner))

    async def report(self, router: str, loads: Mapping[str, int], ttl_s: float) -> None:
        await self._ask(lambda: self._store.report(router, loads, ttl_s))

    async def sessions(self, limit: int = 1000, *, beginning: str = "") -> list[SessionEntry]:
        return await self._ask(lambda: self._store.sessions(limit, beginning=beginning))

    async def session(self, name: str) -> SessionEntry | None:
        return await self._ask(lambda: self._store.session(name))

    async def move(self, name: str, owner: Owner) -> None:
        await self._ask(lambda: self._store.move(name, owner))

    async def drop(self, name: str) -> bool:
        return await self._ask(lambda: self._store.drop(name))

    async def ping(self) -> None:
        await self._ask(self._store.ping)

    async def close(self) -> None:
        """Stop trying, and close the store."""
        if self._trying is not None:
            self._trying.cancel()
            await asyncio.wait([self._trying])
        await self._store.close()

    async def _ask(self, operation: Callable[[], Awaitable[T]]) -> T:
        if self._reason is not None:
            raise StoreError(self._reason)
        try:
            answer = await _guarded(operation)
        except StoreBusyError:
            raise
        except StoreTimeoutError as error:
            self._timeouts += 1
            if self._timeouts >= MAX_TIMEOUTS:
                self._leave_alone(error)
            raise
        except StoreError as error:
            self._leave_alone(error)
            raise
        self._timeouts = 0
        return answer

    def _leave_alone(self, error: StoreError) -> None:
        # Of many operations that fail at one moment the first has done it already.
        if self._reason is None:
            self._reason = str(error)
            _log.warning("The session store is left alone until it can be written again: %s", error)
            self._trying = asyncio.create_task(self._try_again())

    async def _try_again(self) -> None:
        while self._reason is not None:
            await self._sleep(self._retry_s)
            try:
                await _guarded(self._store.ping)
            except StoreError as error:
                self._reason = str(error)
            else:
                self._reason, self._timeouts = None, 0
                _log.warning("The session store is used again.")


async def _guarded(operation: Callable[[], Awaitable[T]]) -> T:
    """Whatever is wrong with the store, a request must not fail of it."""
    try:
        return await operation()
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"The session store failed with {type(error).__name__}.") from error
