"""Redis that is down, lost in a black hole, demoted, full or slow: requests go on without it, and it is used again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from eagle2.config import SessionSettings
from eagle2.errors import ConfigError
from eagle2.session.breaker import MAX_TIMEOUTS, GuardedStore
from eagle2.session.connection import RedisConnection
from eagle2.session.memory import MemorySessionStore
from eagle2.session.store import Owner, Placement, StoreBusyError, StoreError, StoreTimeoutError
from eagle2.session.stores import create_store
from fakes.redis_server import RedisServer, redis_server, sentinel_of
from fakes.tcp_proxy import TcpProxy

A, B = Owner("replica-a", "1"), Owner("replica-b", "1")
PATIENCE_S = 20.0
TIMEOUT_S = 0.8  # where an answer will not come; the default of 0.1 is too little for a busy machine
RETRY_S = 0.1
LOG = "eagle2.session.breaker"


@asynccontextmanager
async def guarded(url: str, *, timeout_s: float = PATIENCE_S) -> AsyncIterator[GuardedStore]:
    store = create_store(SessionSettings(store=url, timeout_s=timeout_s, retry_s=RETRY_S))
    try:
        yield store
    finally:
        await store.close()


async def until(done: Callable[[], bool], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not done():
            await asyncio.sleep(0.01)


async def answers(store: GuardedStore, count: int) -> list[Placement | None]:
    """What ``count`` requests, one after the other, are told; None for those that go on without the store."""
    told: list[Placement | None] = []
    for i in range(count):
        try:
            told.append(await store.lookup(f"s{i % 3}", ["p"]))
        except StoreError:
            told.append(None)
    return told


class TestOnRedis:
    async def test_stopped_and_started_again(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, LOG)
        with redis_server() as server:
            async with guarded(server.url) as store:
                await store.claim("s0", A)
                server.kill()
                assert await answers(store, 100) == [None] * 100
                assert store.is_degraded
                assert str(server.port) in (store.degraded_reason or "")
                server.start()
                await until(lambda: not store.is_degraded)
                assert store.degraded_reason is None
                assert await store.claim("s0", B) == B
                assert (await store.lookup("s0", [])).owner == B
        assert len(caplog.records) == 2  # left alone, used again

    async def test_never_there(self) -> None:
        async with guarded("redis://127.0.0.1:1/0") as store:
            assert await answers(store, 100) == [None] * 100
            assert store.is_degraded

    @pytest.mark.parametrize("connected", [True, False], ids=["connected before", "not connected before"])
    async def test_a_black_hole_costs_few_requests_their_patience(self, connected: bool) -> None:
        with redis_server() as server:
            async with TcpProxy(server.port) as proxy, guarded(proxy.url, timeout_s=TIMEOUT_S) as store:
                if connected:
                    await store.claim("s0", A)
                proxy.black_hole = True
                errors = []
                for _ in range(100):
                    with pytest.raises(StoreError) as caught:
                        await store.lookup("s0", ["p"])
                    errors.append(caught.type)
                # Whoever waited is told so; all others are not made to.
                assert errors == [StoreTimeoutError] * MAX_TIMEOUTS + [StoreError] * (100 - MAX_TIMEOUTS)
                assert store.is_degraded
                proxy.black_hole = False
                await until(lambda: not store.is_degraded)
                assert await store.claim("s0", B) == (A if connected else B)

    async def test_two_hundred_at_one_moment_in_a_black_hole(self) -> None:
        with redis_server() as server:
            async with (
                TcpProxy(server.port) as proxy,
                guarded(f"{proxy.url}?max_connections=4", timeout_s=TIMEOUT_S) as store,
            ):
                await store.claim("s0", A)
                proxy.black_hole = True
                async with asyncio.timeout(20 * TIMEOUT_S):
                    told = await asyncio.gather(*(answers(store, 1) for _ in range(200)))
                assert told == [[None]] * 200
                assert proxy.connections <= 4 + 1 + 20  # the four, and one for each time that it was tried
                proxy.black_hole = False
                await until(lambda: not store.is_degraded)
                assert await asyncio.gather(*(store.claim("s0", B) for _ in range(20))) == [A] * 20

    async def test_frozen_and_thawed(self) -> None:
        with redis_server() as server:
            async with guarded(server.url, timeout_s=TIMEOUT_S) as store:
                await store.claim("s0", A)
                server.freeze()
                assert await answers(store, 10) == [None] * 10
                assert store.is_degraded
                server.thaw()
                await until(lambda: not store.is_degraded)
                assert await store.claim("s0", B) == A

    async def test_too_slow_is_left_alone_until_it_is_not(self) -> None:
        with redis_server() as server:
            async with TcpProxy(server.port) as proxy, guarded(proxy.url, timeout_s=TIMEOUT_S) as store:
                await store.claim("s0", A)
                proxy.delay_s = 3 * TIMEOUT_S
                await answers(store, MAX_TIMEOUTS)
                assert store.is_degraded
                proxy.delay_s = 0.0
                await until(lambda: not store.is_degraded)
                assert await store.claim("s0", B) == A

    async def test_a_late_answer_never_goes_to_another_question(self) -> None:
        with redis_server() as server:
            async with (
                TcpProxy(server.port) as proxy,
                guarded(f"{proxy.url}?max_connections=1", timeout_s=TIMEOUT_S) as store,
            ):
                await store.claim("s0", A)
                await store.claim("s1", B)
                proxy.delay_s = 1.5 * TIMEOUT_S
                with pytest.raises(StoreTimeoutError):
                    await store.lookup("s0", [])
                proxy.delay_s = 0.0
                assert (await store.lookup("s1", [])).owner == B
                assert (await store.lookup("s0", [])).owner == A

    async def test_connections_that_are_cut_are_opened_again_at_once(self) -> None:
        with redis_server() as server:
            async with TcpProxy(server.port) as proxy, guarded(proxy.url) as store:
                for _ in range(5):
                    assert await asyncio.gather(*(store.claim("s0", A) for _ in range(8))) == [A] * 8
                    proxy.cut()
                    await asyncio.sleep(0)
                assert not store.is_degraded

    async def test_a_demoted_primary_is_left_for_the_one_that_the_name_leads_to(self) -> None:
        with redis_server() as old, redis_server() as new:
            async with TcpProxy(old.port) as name, guarded(name.url) as store:
                await store.claim("s0", A)
                with old.client() as client:
                    client.replicaof("127.0.0.1", new.port)
                with pytest.raises(StoreError, match="READONLY"):
                    await store.claim("s0", A)
                assert store.is_degraded
                assert await answers(store, 5) == [None] * 5
                name.upstream_port = new.port  # the name leads there from now on; old connections stay
                await until(lambda: not store.is_degraded)
                assert await store.claim("s0", B) == B
                with new.client() as client:
                    assert client.exists("{eagle2:1}:session:s0")

    async def test_a_demoted_primary_alone_is_used_again_when_it_is_primary(self) -> None:
        with redis_server() as server:
            async with guarded(server.url) as store:
                await store.claim("s0", A)
                with server.client() as client:
                    client.replicaof("127.0.0.1", 1)
                    assert await answers(store, 10) == [None] * 10
                    assert store.is_degraded
                    client.replicaof("no", "one")
                await until(lambda: not store.is_degraded)
                assert await store.claim("s0", B) == A

    async def test_full(self) -> None:
        with redis_server(maxmemory_policy="noeviction") as server:
            async with guarded(server.url) as store:
                await store.claim("s0", A)
                with server.client() as client:
                    client.config_set("maxmemory", "1")
                    with pytest.raises(StoreError, match="OOM"):
                        await store.claim("s1", A)
                    assert store.is_degraded
                    assert "OOM" in (store.degraded_reason or "")
                    client.config_set("maxmemory", "0")
                await until(lambda: not store.is_degraded)
                assert await store.claim("s0", B) == A

    async def test_evicted_keys_are_missing_keys(self) -> None:
        with redis_server() as server:
            async with guarded(server.url) as store:
                await store.claim("s0", A)
                with server.client() as client:
                    client.flushall()
                assert (await store.lookup("s0", [])).owner is None
                assert await store.claim("s0", B) == B

    async def test_a_sentinel_leads_to_the_primary_of_today(self) -> None:
        with redis_server() as one, redis_server() as two, sentinel_of(one) as sentinel:
            # The first Sentinel of the URL is not there.
            url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/mymaster/0?max_connections=4"
            async with guarded(url) as store:
                await store.claim("s0", A)
                assert _knows(one, "s0")
                with one.client() as old, two.client() as new, sentinel.client() as control:
                    new.replicaof("no", "one")
                    old.replicaof("127.0.0.1", two.port)
                    control.sentinel_remove("mymaster")
                    control.sentinel_monitor("mymaster", "127.0.0.1", two.port, 1)
                # The client takes what the old primary says for a lost connection.
                with pytest.raises(StoreError, match="cannot be reached"):
                    await store.claim("s1", B)
                await until(lambda: not store.is_degraded)
                assert await store.claim("s1", B) == B
                assert _knows(two, "s1")


def _knows(server: RedisServer, session: str) -> bool:
    with server.client() as client:
        return bool(client.exists(f"{{eagle2:1}}:session:{session}"))


class _Failing(MemorySessionStore):
    """Fails as told; counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(60.0)
        self.error: Exception | None = None
        self.asked = 0

    async def lookup(self, session: str | None, prefixes: object) -> Placement:
        await self._fail()
        return Placement()

    async def ping(self) -> None:
        await self._fail()

    async def _fail(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


class _Sleeper:
    """Sleeps until it is woken, and says how long it was meant to be."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._wake = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        await self._wake.wait()
        self._wake.clear()

    async def wake(self) -> None:
        self._wake.set()
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("error", "tolerated"),
    [
        (StoreTimeoutError("Late."), MAX_TIMEOUTS - 1),
        (StoreError("Refused."), 0),
        (ValueError("a bug with a CANARY"), 0),
    ],
    ids=["late", "refused", "a bug"],
)
async def test_a_failing_store_is_asked_no_more_until_a_write_succeeds(error: Exception, tolerated: int) -> None:
    inner, sleep = _Failing(), _Sleeper()
    store = GuardedStore(inner, 7.0, sleep=sleep)
    inner.error = error
    for _ in range(tolerated):
        assert await answers(store, 1) == [None]
        assert not store.is_degraded
    assert await answers(store, 50) == [None] * 50
    assert store.is_degraded
    assert inner.asked == tolerated + 1
    assert "CANARY" not in (store.degraded_reason or "")

    await sleep.wake()
    assert store.is_degraded
    inner.error = None
    await sleep.wake()
    assert not store.is_degraded
    assert inner.asked == tolerated + 3
    assert sleep.asked == [7.0, 7.0]
    assert await answers(store, 2) == [Placement()] * 2
    await store.close()


async def test_late_answers_far_apart_are_chance() -> None:
    inner = _Failing()
    store = GuardedStore(inner, 7.0)
    for _ in range(10):
        inner.error = StoreTimeoutError("Late.")
        assert await answers(store, 1) == [None]
        inner.error = None
        assert await answers(store, 1) == [Placement()]
    assert not store.is_degraded


async def test_too_many_questions_say_nothing_about_the_store() -> None:
    inner = _Failing()
    inner.error = StoreBusyError("Busy.")
    store = GuardedStore(inner, 7.0)
    assert await answers(store, 10) == [None] * 10
    assert not store.is_degraded
    assert inner.asked == 10


async def test_who_waits_for_a_connection_waits_no_longer_than_for_an_answer() -> None:
    connection = RedisConnection("redis://127.0.0.1:1/0?max_connections=1", timeout_s=0.05)
    holding = asyncio.Event()

    async def hold() -> None:
        holding.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(20):
        first = asyncio.create_task(connection.run(hold))
        await holding.wait()
        others = await asyncio.gather(*(connection.run(hold) for _ in range(3)), return_exceptions=True)
        with pytest.raises(StoreTimeoutError):
            await first
    # The place of the first is free before or after they give up; whoever gets it is late as well.
    assert all(isinstance(error, StoreBusyError | StoreTimeoutError) for error in others)
    assert any(isinstance(error, StoreBusyError) for error in others)
    await connection.close()


async def test_a_cancelled_request_says_nothing_about_the_store() -> None:
    class Slow(_Failing):
        async def lookup(self, session: str | None, prefixes: object) -> Placement:
            await asyncio.Event().wait()
            raise AssertionError

    store = GuardedStore(Slow(), 7.0)
    for _ in range(5):
        request = asyncio.create_task(store.lookup("s", []))
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    assert not store.is_degraded


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("redis://:CANARY@host:notaport/0", "cannot be read"),
        ("redis://:CANARY@host/0?max_connections=many", "cannot be read"),
        ("redis://:CANARY@host/0?colour=red", "unknown option"),
        ("redis+sentinel://:CANARY@host:26379", "must name a service"),
        ("redis+sentinel://:CANARY@/mymaster", "host:port"),
        ("redis+sentinel://:CANARY@host/mymaster/zero", "cannot be read"),
        ("redis+sentinel://:CANARY@host/mymaster/0?colour=red", "colour is no option"),
        ("redis+sentinel://:CANARY@host/mymaster/0?max_connections=0", "at least 1"),
    ],
)
def test_a_url_without_sense_is_refused_without_its_password(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        RedisConnection(url, timeout_s=1.0)
    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:p%40ss@host:7000/3",
        "rediss://user:p%40ss@host:7000/3?ssl_cert_reqs=required",
        "redis+sentinel://user:p%40ss@h1:26379,h2,h3:7000/mymaster/3",
        "rediss+sentinel://user:p%40ss@h1:26379,h2,h3:7000/mymaster/3?sentinel_password=x&max_connections=9",
    ],
)
def test_urls_name_hosts_database_and_credentials(url: str) -> None:
    connection = RedisConnection(url, timeout_s=1.0)
    options = connection.redis.connection_pool.connection_kwargs
    assert (options["username"], options["password"], options["db"]) == ("user", "p@ss", 3)
    assert "p@ss" not in connection.address
    if "sentinel" in url:
        assert connection.address == "Redis mymaster behind h1:26379, h2:26379, h3:7000"
    made = connection.redis.connection_pool.make_connection()
    assert ("SSL" in type(made).__name__) == url.startswith("rediss")


async def test_without_redis_the_store_is_in_memory() -> None:
    store = create_store(SessionSettings())
    assert await store.claim("s", A) == A
    assert not store.is_degraded
    await store.close()
