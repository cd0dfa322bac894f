"""Token buckets: what a key may still use, refilled evenly over the minute, in this process or in Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from eagle2.config import SessionSettings
from eagle2.session.scripts import KEY_PREFIX
from eagle2.session.store import StoreError

if TYPE_CHECKING:
    from eagle2.session.connection import RedisConnection

PERIOD_S = 60.0
_QUOTA = KEY_PREFIX + "quota:"


@dataclass(frozen=True, slots=True)
class Level:
    """What became of a request to take: whether it was granted, and what the bucket holds now.

    ``left`` is below 0 while a debt is paid off.
    """

    granted: bool
    left: float


class Buckets(Protocol):
    """Buckets by name, each full at first; ``per_minute`` is what one holds, and what flows into it in a minute."""

    async def take(self, name: str, cost: float, per_minute: int, *, debt: bool = False) -> Level:
        """Take ``cost`` if there is as much, or if the bucket is full: a request larger than a whole bucket is served
        once nothing else was for a minute. ``debt`` takes it in any case. Ends in bounded time, with any error."""
        ...


def wait_s(left: float, cost: float, per_minute: int) -> float:
    """Seconds until a bucket that holds ``left`` would grant ``cost``."""
    return max(0.0, min(cost, per_minute) - left) * PERIOD_S / per_minute


class LocalBuckets:
    """The buckets of one process. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}

    async def take(self, name: str, cost: float, per_minute: int, *, debt: bool = False) -> Level:
        now = self._clock()
        left, at = self._levels.get(name, (float(per_minute), now))
        left = min(per_minute, left + max(0.0, now - at) * per_minute / PERIOD_S)
        granted = debt or left >= min(cost, per_minute)
        if granted:
            left -= cost
        self._levels[name] = (left, now)
        return Level(granted, left)


# Redis tells the time, so that routers whose clocks differ agree. What cannot be read counts as a full bucket.
_TAKE = """
local most, period, cost, debt = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1'
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local saved = redis.call('HMGET', KEYS[1], 'left', 'at')
local left, at = tonumber(saved[1]), tonumber(saved[2])
if left == nil or at == nil or left ~= left or at ~= at then left, at = most, now end
left = math.min(most, left + math.max(0, now - at) * most / period)
local granted = debt or left >= math.min(cost, most)
if granted then left = left - cost end
redis.call('HSET', KEYS[1], 'left', string.format('%.6f', left), 'at', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], string.format('%d', math.ceil((most - left) * period / most * 1000) + 1000))
return {granted and 1 or 0, string.format('%.6f', left)}
"""


class RedisBuckets:
    """The buckets that all routers share. Raises ``StoreError``, in the time that the connection allows."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._script = connection.redis.register_script(_TAKE)

    async def take(self, name: str, cost: float, per_minute: int, *, debt: bool = False) -> Level:
        keys, args = [_QUOTA + name], [per_minute, PERIOD_S, cost, int(debt)]
        answer = await self._connection.run(lambda: self._script(keys=keys, args=args))
        try:
            granted, left = answer
            return Level(bool(int(granted)), float(left))
        except (TypeError, ValueError):
            raise StoreError(f"{self._connection.address} answered with nonsense.") from None


def shared_buckets(settings: SessionSettings) -> Buckets | None:
    """Buckets in the Redis of the session store; None where sessions are kept in memory. Nothing is connected yet."""
    if settings.store.startswith("memory://"):
        return None
    # Routers with a store in memory need no client for Redis.
    from eagle2.session.connection import RedisConnection

    return RedisBuckets(RedisConnection(settings.store, timeout_s=settings.timeout_s))
