"""A bounded connection to Redis: every operation ends in time, and every failure is one kind of error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from redis import exceptions
from redis.asyncio import ConnectionPool, Redis, Sentinel
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff

from eagle2.errors import ConfigError
from eagle2.session.store import StoreBusyError, StoreError, StoreTimeoutError

MAX_CONNECTIONS = 16
_SENTINEL_PORT = 26379
_SENTINEL_OPTIONS = ("max_connections", "sentinel_username", "sentinel_password")
# The client takes the code out of the errors that it knows.
_CODES = {
    exceptions.ReadOnlyError: "READONLY",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.AuthenticationError: "WRONGPASS or NOAUTH",
    exceptions.NoPermissionError: "NOPERM",
}
_CODE = re.compile(r"[A-Z]{2,}\b")
T = TypeVar("T")


class RedisConnection:
    """Redis at a ``redis://``, ``rediss://``, ``redis+sentinel://`` or ``rediss+sentinel://`` URL.

    ``redis`` is the client; operations on it go through ``run``. ``address`` names it without its password. Connects
    when it is used first. ``?max_connections=N`` in the URL bounds the connections, 16 by default.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """``timeout_s`` bounds every operation, connecting included, and before it the wait for a free connection.

        Raises ``ConfigError`` for a URL that cannot be used.
        """
        self._timeout_s = timeout_s
        self._sentinel: Sentinel | None = None
        scheme = url.partition("://")[0]
        pool: ConnectionPool
        try:
            if scheme.endswith("+sentinel"):
                self.address, pool = self._through_sentinel(url)
            else:
                self.address, pool = self._direct(url)
        except (ValueError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            # The error and the URL may both hold the password.
            raise ConfigError(f"The {scheme}:// URL of the session store cannot be read.") from None
        self._pool = pool
        self._places = asyncio.Semaphore(pool.max_connections)
        self.redis: Redis = Redis(connection_pool=pool)

    async def run(self, operation: Callable[[], Awaitable[T]]) -> T:
        """What ``operation`` on the client returns. Raises ``StoreError``: ``StoreTimeoutError`` when it is late, and
        ``StoreBusyError`` when it was never begun."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise StoreBusyError(f"All connections to {self.address} were busy for {self._timeout_s:g} s.") from None
        try:
            return await self._bounded(operation)
        finally:
            self._places.release()

    async def _bounded(self, operation: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await operation()
        except (TimeoutError, exceptions.TimeoutError):
            raise StoreTimeoutError(f"{self.address} did not answer within {self._timeout_s:g} s.") from None
        except (exceptions.AuthenticationError, exceptions.ResponseError) as error:
            if isinstance(error, exceptions.ReadOnlyError):
                # The primary of yesterday: names and Sentinels know the one of today, when they are asked anew.
                with suppress(Exception):
                    async with asyncio.timeout(self._timeout_s):
                        await self._pool.disconnect(inuse_connections=False)
            raise StoreError(f"{self.address} refused with {_code(error)}.") from None
        except exceptions.ConnectionError as error:
            found_none = type(error).__name__ == "MasterNotFoundError"
            raise StoreError(f"{self.address} {'has no primary' if found_none else 'cannot be reached'}.") from None
        except (exceptions.RedisError, OSError) as error:
            raise StoreError(f"{self.address} failed with {type(error).__name__}.") from None

    async def close(self) -> None:
        """Close all connections. The next operation would open new ones."""
        await self._pool.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()

    def _options(self) -> dict[str, Any]:
        return {
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            # Once more at once where a connection turns out to be closed; whatever takes time is the caller's matter.
            "retry": Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,)),
            "protocol": 2,
        }

    def _direct(self, url: str) -> tuple[str, ConnectionPool]:
        parts = urlsplit(url)
        pool = ConnectionPool.from_url(url, **{"max_connections": MAX_CONNECTIONS, **self._options()})
        _at_least_one(pool.max_connections)
        try:
            # An option that the URL names and no connection has.
            pool.make_connection()
        except TypeError:
            raise ConfigError(f"The {parts.scheme}:// URL of the session store has an unknown option.") from None
        return f"Redis at {parts.hostname or 'localhost'}:{parts.port or 6379}", pool

    def _through_sentinel(self, url: str) -> tuple[str, SentinelConnectionPool]:
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        username, _, password = credentials.partition(":")
        sentinels = [_host_and_port(host) for host in hosts.split(",")]
        service, _, database = parts.path.strip("/").partition("/")
        if not service:
            raise ConfigError(
                "The URL of the session store must name a service: redis+sentinel://host:26379/service/0."
            )
        options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        if unknown := sorted(set(options) - set(_SENTINEL_OPTIONS)):
            raise ConfigError(f"{unknown[0]} is no option of a Sentinel URL; known are {', '.join(_SENTINEL_OPTIONS)}.")
        if parts.scheme not in ("redis+sentinel", "rediss+sentinel"):
            raise ConfigError(f"{parts.scheme}:// is no URL of a Sentinel.")
        ssl = {"ssl": True} if parts.scheme.startswith("rediss") else {}
        # One that does not answer leaves time to ask the next, and the server itself.
        share_s = self._timeout_s / (len(sentinels) + 1)
        self._sentinel = Sentinel(
            sentinels,
            sentinel_kwargs={
                **self._options(),
                "socket_timeout": share_s,
                "socket_connect_timeout": share_s,
                "username": options.get("sentinel_username"),
                "password": options.get("sentinel_password"),
                **ssl,
            },
        )
        pool = SentinelConnectionPool(
            service,
            self._sentinel,
            max_connections=_at_least_one(int(options.get("max_connections", MAX_CONNECTIONS))),
            db=int(database or 0),
            username=unquote(username) or None,
            password=unquote(password) or None,
            **self._options(),
            **ssl,
        )
        return f"Redis {service} behind {', '.join(f'{host}:{port}' for host, port in sentinels)}", pool


def _code(error: Exception) -> str:
    """What a server answered, without its words: they may name a key or a user."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    found = _CODE.match(str(error))
    return found.group() if found else type(error).__name__


def _at_least_one(max_connections: int) -> int:
    if max_connections < 1:
        raise ConfigError(f"max_connections must be at least 1, not {max_connections}.")
    return max_connections


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ConfigError("The URL of the session store must name its Sentinels as host:port,host:port.")
    return parts.hostname, parts.port or _SENTINEL_PORT
