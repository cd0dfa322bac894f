"""The session store that routers share. Losing it loses warm caches, never an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from eagle2.session import scripts
from eagle2.session.connection import RedisConnection
from eagle2.session.memory import MAX_HOLDERS
from eagle2.session.store import Owner, Placement, SessionEntry, StoreError

_SESSION = scripts.KEY_PREFIX + "session:"
_LEASES = scripts.KEY_PREFIX + "routers"
_SCAN_COUNT = 1000
_MAX_VALUE_BYTES = 1 << 20


class RedisSessionStore:
    """``SessionStore`` in Redis 6.2 or newer. Its keys hold hashes and the names of replicas and routers only."""

    def __init__(self, connection: RedisConnection, ttl_s: float) -> None:
        self._connection = connection
        self._redis = connection.redis
        self._ttl_ms = _milliseconds(ttl_s)
        self._own: set[str] = set()
        self._lookup = self._redis.register_script(scripts.LOOKUP)
        self._claim = self._redis.register_script(scripts.CLAIM)
        self._hold = self._redis.register_script(scripts.HOLD)
        self._report = self._redis.register_script(scripts.REPORT)

    async def lookup(self, session: str | None, prefixes: Sequence[str]) -> Placement:
        keys = [_LEASES, *([_SESSION + session] if session is not None else []), *map(_prefix_key, prefixes)]
        answer = await self._call(self._lookup, keys, [self._ttl_ms, int(session is not None)])
        try:
            now_ms, owner, leases, holders = answer
            others = [
                loads
                for router, lease in zip(leases[::2], leases[1::2], strict=True)
                if router.decode(errors="replace") not in self._own
                and (loads := _read_lease(lease, now_ms)) is not None
            ]
            held = tuple(frozenset(filter(None, map(_read_owner, found))) for found in holders)
        except (TypeError, ValueError, AttributeError):
            raise StoreError(f"{self._connection.address} answered with nonsense.") from None
        total: dict[str, int] = {}
        for loads in others:
            for uid, count in loads.items():
                total[uid] = total.get(uid, 0) + count
        return Placement(_read_owner(owner), held, total, len(others))

    async def claim(self, session: str, candidate: Owner, *, instead_of: Owner | None = None) -> Owner:
        replaced: str | bytes = "" if instead_of is None else _write_owner(instead_of)
        # What nobody can read belongs to nobody; whoever else replaces it at this moment is told to us.
        for _ in range(2):
            value = await self._call(
                self._claim, [_SESSION + session], [self._ttl_ms, _write_owner(candidate), replaced]
            )
            owner = _read_owner(value)
            if owner is not None:
                return owner
            replaced = value if isinstance(value, bytes) else b""
        raise StoreError(f"{self._connection.address} answered with nonsense.")

    async def hold(self, prefixes: Sequence[str], owner: Owner) -> None:
        if prefixes:
            await self._call(
                self._hold, list(map(_prefix_key, prefixes)), [self._ttl_ms, _write_owner(owner), MAX_HOLDERS]
            )

    async def report(self, router: str, loads: Mapping[str, int], ttl_s: float) -> None:
        self._own.add(router)
        value = json.dumps(dict(loads), separators=(",", ":"))
        await self._call(self._report, [_LEASES], [_milliseconds(ttl_s), router, value])

    async def sessions(self, limit: int = 1000, *, beginning: str = "") -> list[SessionEntry]:
        found: dict[str, SessionEntry] = {}
        cursor = 0
        while True:
            # One operation for each page, so that none takes long however many keys there are.
            cursor, keys = await self._connection.run(
                lambda at=cursor: self._redis.scan(at, match=f"{_SESSION}{beginning}*", count=_SCAN_COUNT)  # type: ignore[misc]
            )
            for entry in await self._entries([key.decode(errors="replace") for key in keys if isinstance(key, bytes)]):
                found[entry.name] = entry
            if cursor == 0 or len(found) >= limit:
                return list(found.values())[:limit]

    async def session(self, name: str) -> SessionEntry | None:
        entries = await self._entries([_SESSION + name])
        return entries[0] if entries else None

    async def move(self, name: str, owner: Owner) -> None:
        await self._connection.run(lambda: self._redis.set(_SESSION + name, _write_owner(owner), px=self._ttl_ms))

    async def drop(self, name: str) -> bool:
        return bool(await self._connection.run(lambda: self._redis.delete(_SESSION + name)))

    async def ping(self) -> None:
        await self._connection.run(lambda: self._redis.set(scripts.KEY_PREFIX + "ping", "1", px=1000))

    async def close(self) -> None:
        await self._connection.close()

    async def _call(self, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        return await self._connection.run(lambda: script(keys=keys, args=arguments))

    async def _entries(self, keys: list[str]) -> list[SessionEntry]:
        async def read() -> list[Any]:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.get(key)
                    pipeline.pttl(key)
                answers: list[Any] = await pipeline.execute(raise_on_error=False)
                return answers

        if not keys:
            return []
        answers = await self._connection.run(read)
        return [
            SessionEntry(key.removeprefix(_SESSION), owner, ttl_ms / 1000)
            for key, value, ttl_ms in zip(keys, answers[::2], answers[1::2], strict=True)
            if (owner := _read_owner(value)) is not None and isinstance(ttl_ms, int) and ttl_ms > 0
        ]


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))


def _prefix_key(prefix: str) -> str:
    return f"{scripts.KEY_PREFIX}prefix:{prefix}"


def _write_owner(owner: Owner) -> str:
    return json.dumps([owner.replica, owner.incarnation], separators=(",", ":"))


def _read_json(value: object) -> object:
    """None for what is no JSON."""
    if not isinstance(value, bytes) or len(value) > _MAX_VALUE_BYTES:
        return None
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return parsed


def _read_owner(value: object) -> Owner | None:
    match _read_json(value):
        case [str(replica), str(incarnation)]:
            return Owner(replica, incarnation)
        case _:
            return None


def _read_lease(value: object, now_ms: int) -> dict[str, int] | None:
    """The loads of a router, None when its lease has ended or cannot be read."""
    if not isinstance(value, bytes):
        return None
    end, _, text = value.partition(b" ")
    loads = _read_json(text)
    if not end.isdigit() or len(end) > 15 or int(end) <= now_ms or not isinstance(loads, dict):
        return None
    return {uid: count for uid, count in loads.items() if type(count) is int and 0 <= count < 1 << 31}
