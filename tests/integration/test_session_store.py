"""What every session store does: the one in memory, Redis, and either behind its guard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle2.config import SessionSettings
from eagle2.session.breaker import GuardedStore
from eagle2.session.connection import RedisConnection
from eagle2.session.memory import MAX_HOLDERS, MemorySessionStore
from eagle2.session.redis import RedisSessionStore
from eagle2.session.store import Owner, SessionStore, StoreError
from eagle2.session.stores import create_store
from fakes.redis_server import RedisServer, redis_server

TTL_S = 60.0
A, B, C = Owner("replica-a", "1"), Owner("replica-b", "1"), Owner("replica-a", "2")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@dataclass
class Pair:
    """Two routers' stores of the same contents; ``pass_time`` moves the clock that entries end by."""

    one: SessionStore
    two: SessionStore
    pass_time: Callable[[float], None]


def _memory() -> Pair:
    now = [0.0]
    one = MemorySessionStore(TTL_S, clock=lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    return Pair(one, MemorySessionStore(TTL_S, clock=lambda: now[0], beside=one), pass_time)


def redis_store(url: str, *, ttl_s: float = TTL_S, timeout_s: float = 5.0) -> RedisSessionStore:
    return RedisSessionStore(RedisConnection(url, timeout_s=timeout_s), ttl_s)


def _redis(server: RedisServer) -> Pair:
    with server.client() as client:
        client.flushall()

    def pass_time(seconds: float) -> None:
        """Redis' clock cannot be moved, so the ends of all keys are, and what they hold of times."""
        with server.client() as client:
            for key in client.keys("*"):
                left = client.pttl(key) - round(seconds * 1000)
                client.pexpire(key, left) if left > 0 else client.delete(key)
                if client.type(key) == b"zset":
                    for member, score in client.zrange(key, 0, -1, withscores=True):
                        client.zadd(key, {member: score - seconds * 1000})
                if client.type(key) == b"hash":
                    for field, lease in client.hgetall(key).items():
                        end, _, loads = lease.partition(b" ")
                        client.hset(key, field, b"%d %s" % (int(end) - round(seconds * 1000), loads))

    return Pair(redis_store(server.url), redis_store(server.url), pass_time)


@pytest.fixture(params=["memory", "redis", "guarded memory", "guarded redis"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair = _redis(request.getfixturevalue("server")) if request.param.endswith("redis") else _memory()
    if request.param.startswith("guarded"):
        pair = Pair(GuardedStore(pair.one, 1.0), GuardedStore(pair.two, 1.0), pair.pass_time)
    yield pair
    await pair.one.close()
    await pair.two.close()


async def test_an_empty_store_knows_nothing(pair: Pair) -> None:
    placement = await pair.one.lookup("s", ["p", "q"])
    assert (placement.owner, placement.holders, placement.loads, placement.routers) == (
        None,
        (frozenset(), frozenset()),
        {},
        0,
    )
    assert await pair.one.session("s") is None
    assert await pair.one.sessions() == []
    assert not await pair.one.drop("s")
    await pair.one.ping()


async def test_the_first_claim_wins_until_it_is_replaced_on_purpose(pair: Pair) -> None:
    assert await pair.one.claim("s", A) == A
    assert await pair.two.claim("s", B) == A
    assert await pair.two.claim("s", B, instead_of=C) == A
    assert await pair.two.claim("s", B, instead_of=A) == B
    assert (await pair.one.lookup("s", [])).owner == B
    assert (await pair.one.lookup("other", [])).owner is None


async def test_another_incarnation_is_another_owner(pair: Pair) -> None:
    await pair.one.claim("s", A)
    assert await pair.one.claim("s", C) == A
    assert await pair.one.claim("s", C, instead_of=A) == C


async def test_use_keeps_a_session_alive_and_nothing_else_does(pair: Pair) -> None:
    for name in ("looked up", "claimed", "idle"):
        await pair.one.claim(name, A)
    pair.pass_time(TTL_S * 0.75)
    await pair.two.lookup("looked up", [])
    await pair.two.claim("claimed", B)
    assert await pair.one.session("idle") is not None
    pair.pass_time(TTL_S * 0.75)
    assert (await pair.one.lookup("looked up", [])).owner == A
    assert (await pair.one.lookup("claimed", [])).owner == A
    assert (await pair.one.lookup("idle", [])).owner is None
    assert await pair.one.session("idle") is None
    assert await pair.one.claim("idle", B) == B


async def test_of_prefixes_the_holders_are_told_in_order(pair: Pair) -> None:
    await pair.one.hold(["p", "q"], A)
    await pair.two.hold(["p"], B)
    await pair.two.hold([], B)
    assert (await pair.one.lookup(None, ["q", "r", "p"])).holders == (
        frozenset({A}),
        frozenset(),
        frozenset({A, B}),
    )


async def test_a_holder_is_forgotten_on_its_own(pair: Pair) -> None:
    await pair.one.hold(["p"], A)
    pair.pass_time(TTL_S * 0.75)
    await pair.one.hold(["p"], B)
    pair.pass_time(TTL_S * 0.75)
    assert (await pair.one.lookup(None, ["p"])).holders == (frozenset({B}),)


async def test_the_holders_of_a_prefix_are_bounded(pair: Pair) -> None:
    owners = [Owner(f"replica-{i:02}", "1") for i in range(MAX_HOLDERS + 3)]
    for owner in owners:
        await pair.one.hold(["p"], owner)
        pair.pass_time(0.01)
    assert (await pair.one.lookup(None, ["p"])).holders == (frozenset(owners[3:]),)


async def test_routers_hear_of_the_loads_of_others(pair: Pair) -> None:
    await pair.one.report("router-1", {"a": 3, "b": 1}, 10)
    await pair.two.report("router-2", {"a": 2}, 10)
    heard = await pair.one.lookup(None, [])
    assert (dict(heard.loads), heard.routers) == ({"a": 2}, 1)
    heard = await pair.two.lookup("s", ["p"])
    assert (dict(heard.loads), heard.routers) == ({"a": 3, "b": 1}, 1)
    await pair.one.report("router-1", {}, 10)
    heard = await pair.two.lookup(None, [])
    assert (dict(heard.loads), heard.routers) == ({}, 1)


async def test_a_router_that_dies_is_gone_from_the_loads(pair: Pair) -> None:
    await pair.one.report("router-1", {"a": 3}, 3)
    await pair.two.report("router-2", {"a": 1}, 30)
    pair.pass_time(2.0)
    assert (await pair.two.lookup(None, [])).loads == {"a": 3}
    pair.pass_time(1.5)
    heard = await pair.two.lookup(None, [])
    assert (dict(heard.loads), heard.routers) == ({}, 0)
    assert (await pair.one.lookup(None, [])).loads == {"a": 1}


async def test_operators_list_show_move_and_drop(pair: Pair) -> None:
    for i in range(5):
        await pair.one.claim(f"{i % 2}{i}", A)
    listed = await pair.two.sessions()
    assert sorted(entry.name for entry in listed) == ["00", "02", "04", "11", "13"]
    assert all(entry.owner == A and 0 < entry.expires_s <= TTL_S for entry in listed)
    assert len(await pair.two.sessions(3)) == 3
    assert sorted(entry.name for entry in await pair.two.sessions(beginning="1")) == ["11", "13"]

    await pair.two.move("00", B)
    await pair.two.move("new", B)
    shown = await pair.one.session("00")
    assert shown is not None
    assert (shown.name, shown.owner) == ("00", B)
    assert (await pair.one.lookup("new", [])).owner == B
    assert await pair.one.drop("00")
    assert not await pair.one.drop("00")
    assert (await pair.two.lookup("00", [])).owner is None


async def test_of_many_claims_at_one_moment_one_wins_and_all_are_told(pair: Pair) -> None:
    async def claim(store: SessionStore, router: int, session: int, i: int) -> tuple[int, Owner]:
        return session, await store.claim(f"s{session}", Owner(f"replica-{router}-{i}", "1"))

    told = await asyncio.gather(
        *(
            claim(store, router, session, i)
            for i in range(50)
            for session in range(20)
            for router, store in enumerate((pair.one, pair.two))
        )
    )
    owners = {session: {owner for s, owner in told if s == session} for session in range(20)}
    assert all(len(one) == 1 for one in owners.values())
    for session, (owner,) in owners.items():
        assert (await pair.one.lookup(f"s{session}", [])).owner == owner


_NAMES = st.sampled_from(["s", "t"])
_OWNERS = st.sampled_from([A, B, C])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), _NAMES, _OWNERS, st.none() | _OWNERS),
        st.tuples(st.just("hold"), st.lists(_NAMES, max_size=2, unique=True), _OWNERS),
        st.tuples(st.just("report"), st.sampled_from([1, 2]), st.dictionaries(_NAMES, st.integers(0, 9), max_size=2)),
        st.tuples(st.just("move"), _NAMES, _OWNERS),
        st.tuples(st.just("drop"), _NAMES),
        st.tuples(st.just("pass"), st.sampled_from([1.0, 25.0, 45.0])),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
def test_memory_and_redis_cannot_be_told_apart(server: RedisServer, steps: list[tuple]) -> None:  # type: ignore[type-arg]
    async def seen(pair: Pair) -> list[object]:
        answers: list[object] = []
        for kind, *arguments in steps:
            match kind:
                case "claim":
                    answers.append(await pair.one.claim(arguments[0], arguments[1], instead_of=arguments[2]))
                case "hold":
                    await pair.two.hold(*arguments)
                case "report":
                    await (pair.one, pair.two)[arguments[0] - 1].report(f"router-{arguments[0]}", arguments[1], 30)
                case "move":
                    await pair.one.move(*arguments)
                case "drop":
                    answers.append(await pair.two.drop(*arguments))
                case "pass":
                    pair.pass_time(*arguments)
            for store in (pair.one, pair.two):
                placement = await store.lookup("s", ["s", "t"])
                answers.append((placement.owner, placement.holders, dict(placement.loads), placement.routers))
        await pair.one.close()
        await pair.two.close()
        return answers

    assert asyncio.run(seen(_redis(server))) == asyncio.run(seen(_memory()))


async def test_memory_is_bounded_and_forgets_the_least_used() -> None:
    store = MemorySessionStore(TTL_S, max_entries=3)
    for name in "abc":
        await store.claim(name, A)
        await store.hold([name], A)
    await store.lookup("a", [])
    await store.claim("d", A)
    await store.hold(["d"], A)
    assert {entry.name for entry in await store.sessions()} == {"a", "c", "d"}
    assert (await store.lookup(None, ["a", "d"])).holders == (frozenset(), frozenset({A}))


@pytest.mark.parametrize(
    "value",
    [b"", b"{", b"null", b"[]", b'["a"]', b'["a",1]', b'["a","b","c"]', b'{"a":"b"}', b"\xff\xfe", b"[" * 50_000],
    ids=lambda value: repr(value[:12]),
)
async def test_a_value_that_is_nonsense_counts_as_missing_and_is_replaced(server: RedisServer, value: bytes) -> None:
    pair = _redis(server)
    with server.client() as client:
        client.set("{eagle2:1}:session:s", value)
        client.zadd("{eagle2:1}:prefix:p", {value: 1e15})
        client.hset("{eagle2:1}:routers", mapping={b"router-3": value, b"router-4": b"99999999999999 " + value})
    placement = await pair.one.lookup("s", ["p"])
    assert (placement.owner, placement.holders) == (None, (frozenset(),))
    assert all(type(count) is int for count in placement.loads.values())
    assert await pair.one.session("s") is None
    assert await pair.one.sessions() == []
    told = await asyncio.gather(*(store.claim("s", owner) for store in (pair.one, pair.two) for owner in (A, B)))
    assert len(set(told)) == 1
    assert (await pair.one.lookup("s", [])).owner == told[0]
    await pair.one.close()
    await pair.two.close()


async def test_keys_of_another_type_count_as_missing_and_are_replaced(server: RedisServer) -> None:
    pair = _redis(server)
    with server.client() as client:
        client.rpush("{eagle2:1}:session:s", "x")
        client.set("{eagle2:1}:prefix:p", "x")
        client.set("{eagle2:1}:routers", "x")
    placement = await pair.one.lookup("s", ["p"])
    assert (placement.owner, placement.holders, placement.routers) == (None, (frozenset(),), 0)
    assert await pair.one.claim("s", A) == A
    await pair.one.hold(["p"], A)
    await pair.two.report("router-2", {"a": 1}, 10)
    placement = await pair.one.lookup("s", ["p"])
    assert (placement.owner, placement.holders, placement.routers) == (A, (frozenset({A}),), 1)
    await pair.one.close()
    await pair.two.close()


async def test_everything_in_redis_ends_on_its_own(server: RedisServer) -> None:
    pair = _redis(server)
    await pair.one.claim("s", A)
    await pair.one.move("t", A)
    await pair.one.hold(["p"], A)
    await pair.one.report("router-1", {"a": 1}, 10)
    await pair.one.ping()
    with server.client() as client:
        keys = client.keys("*")
        assert len(keys) == 5
        assert all(0 < client.pttl(key) <= TTL_S * 1000 for key in keys)
        assert all(key.startswith(b"{eagle2:1}:") for key in keys)
    await pair.one.close()
    await pair.two.close()


async def test_scripts_are_loaded_again_when_redis_has_forgotten_them(server: RedisServer) -> None:
    store = _redis(server).one
    await store.claim("s", A)
    with server.client() as client:
        client.script_flush()
    assert await store.claim("s", B) == A
    await store.close()


async def test_four_connections_serve_two_hundred_callers(server: RedisServer) -> None:
    _redis(server)
    store = create_store(SessionSettings(store=f"{server.url}?max_connections=4", timeout_s=20.0))
    told = await asyncio.gather(*(store.claim("s", Owner(f"replica-{i}", "1")) for i in range(200)))
    assert len(set(told)) == 1
    with server.client() as client:
        assert len([c for c in client.client_list() if c["cmd"].startswith("evalsha")]) <= 4
    await store.close()


async def test_callers_that_leave_give_their_connections_back(server: RedisServer) -> None:
    _redis(server)
    store = create_store(SessionSettings(store=f"{server.url}?max_connections=2", timeout_s=20.0))
    for i in range(50):
        leaving = asyncio.create_task(store.claim("s", A))
        for _ in range(i % 7):
            await asyncio.sleep(0)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
    assert await asyncio.gather(*(store.claim("s", B) for _ in range(10))) in ([A] * 10, [B] * 10)
    await store.close()


async def test_a_password_is_used_and_never_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server() as server:
        with server.client() as client:
            client.config_set("requirepass", "s3cret/CANARY")
        address = f"127.0.0.1:{server.port}"
        good = create_store(SessionSettings(store=f"redis://:s3cret%2FCANARY@{address}/0", timeout_s=5.0))
        assert await good.claim("s", A) == A
        for credentials in ("", ":wrong-CANARY@"):
            bad = create_store(SessionSettings(store=f"redis://{credentials}{address}/0", timeout_s=5.0))
            with pytest.raises(StoreError, match=address) as caught:
                await bad.claim("s", A)
            assert bad.is_degraded
            assert "CANARY" not in f"{caught.value} {bad.degraded_reason}"
            await bad.close()
        await good.close()
    assert "CANARY" not in caplog.text
