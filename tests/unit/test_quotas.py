"""Requests and tokens per minute: the buckets, in memory and in a real Redis, and what callers are told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle2.config import SessionSettings
from eagle2.protocol import Commit
from eagle2.router.buckets import PERIOD_S, Buckets, Level, LocalBuckets, shared_buckets, wait_s
from eagle2.router.quotas import QuotaError, Quotas, rate_headers
from eagle2.router.tenants import Caller
from eagle2.session.store import StoreError
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from fakes.redis_server import RedisServer, redis_server


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


@pytest.fixture(params=["memory", "redis"])
def buckets(request: pytest.FixtureRequest) -> Buckets:
    if request.param == "memory":
        return LocalBuckets()
    server: RedisServer = request.getfixturevalue("server")
    with server.client() as client:
        client.flushall()
    return of(server)


def of(server: RedisServer, timeout_s: float = 5.0) -> Buckets:
    found = shared_buckets(SessionSettings(store=server.url, timeout_s=timeout_s))
    assert found is not None
    return found


async def test_a_bucket_is_full_at_first_and_refuses_when_used_up(buckets: Buckets) -> None:
    began = time.monotonic()
    granted = [await buckets.take("a", 1, 3) for _ in range(5)]
    refilled = (time.monotonic() - began + 0.01) * 3 / PERIOD_S
    assert [level.granted for level in granted] == [True, True, True, False, False]
    for level, left in zip(granted, [2, 1, 0, 0, 0], strict=True):
        assert left - 1e-3 <= level.left <= left + refilled + 1e-3
    assert (await buckets.take("b", 1, 3)).granted, "another key has a bucket of its own"


async def test_a_debt_is_always_taken_and_paid_off_first(buckets: Buckets) -> None:
    level = await buckets.take("a", 250, 100, debt=True)
    assert level.granted
    assert level.left == pytest.approx(-150, abs=1e-3)
    assert not (await buckets.take("a", 1, 100)).granted


async def test_more_than_a_bucket_holds_needs_a_full_one(buckets: Buckets) -> None:
    assert (await buckets.take("a", 500, 100)).granted
    assert not (await buckets.take("a", 500, 100)).granted
    await buckets.take("b", 1, 100)
    assert not (await buckets.take("b", 500, 100)).granted


async def test_buckets_fill_again(buckets: Buckets) -> None:
    per_minute = 60_000  # one a millisecond
    await buckets.take("a", per_minute, per_minute)
    limit = time.monotonic() + 20
    while not (await buckets.take("a", 20, per_minute)).granted:
        assert time.monotonic() < limit
        await asyncio.sleep(0.005)


async def test_of_many_at_once_as_many_are_granted_as_there_is_room(buckets: Buckets) -> None:
    levels = await asyncio.gather(*(buckets.take("a", 1, 10) for _ in range(30)))
    assert sum(level.granted for level in levels) == 10


@given(
    st.lists(st.tuples(st.floats(0, 90), st.integers(1, 150), st.booleans()), max_size=40),
    st.integers(1, 100),
)
def test_never_more_than_the_bucket_and_its_refill(steps: list[tuple[float, int, bool]], per_minute: int) -> None:
    """What is granted without debt and at most a bucket large is bounded; whoever waits as told is granted."""
    clock = Clock()
    local = LocalBuckets(clock)

    async def run() -> None:
        used = 0.0
        for pause, cost, waits in steps:
            clock.now += pause
            level = await local.take("a", min(cost, per_minute), per_minute)
            if not level.granted and waits:
                clock.now += wait_s(level.left, cost, per_minute) + 1e-6
                level = await local.take("a", min(cost, per_minute), per_minute)
                assert level.granted
            used += min(cost, per_minute) * level.granted
            assert used <= per_minute * (1 + clock.now / PERIOD_S) + 1e-6
            assert level.left <= per_minute

    asyncio.run(run())


@pytest.mark.parametrize("junk", [{"left": "x", "at": "0"}, {"left": "nan", "at": "nan"}, {"at": "1"}, {"left": "7"}])
async def test_what_cannot_be_read_is_a_full_bucket(server: RedisServer, junk: dict[str, str]) -> None:
    with server.client() as client:
        client.flushall()
        assert (await of(server).take("a", 1, 3)).granted
        (key,) = client.keys()
        client.delete(key)
        client.hset(key, mapping=junk)
        level = await of(server).take("a", 1, 3)
        assert level.left == pytest.approx(2, abs=1e-3)
        assert 0 < client.pttl(key) <= 60_000, "what nobody asks for is forgotten once it is full"


async def test_two_routers_share_a_bucket(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()
    one, other = of(server), of(server)
    granted = [(await side.take("a", 1, 4)).granted for side in (one, other) * 4]
    assert granted == [True] * 4 + [False] * 4


def test_a_store_in_memory_shares_nothing() -> None:
    assert shared_buckets(SessionSettings()) is None


CALLER = Caller("tenant-hash", "key-hash", requests_per_minute=2, tokens_per_minute=100)


async def test_callers_without_limits_cost_nothing() -> None:
    quotas = Quotas(Recorder(), Broken())
    assert await quotas.take_request(Caller("t", "k")) == {}
    assert await quotas.take_prompt(Caller("t", "k"), 10**9) == {}
    quotas.charge_answer(Caller("t", "k"), 10**9)
    await quotas.settle()


async def test_requests_are_counted_and_refused() -> None:
    recorder, clock = Recorder(), Clock()
    quotas = Quotas(recorder, clock=clock)
    assert (await quotas.take_request(CALLER))["x-ratelimit-remaining-requests"] == "1"
    assert (await quotas.take_request(CALLER))["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(QuotaError, match=r"2 requests a minute .* in 30 seconds") as caught:
        await quotas.take_request(CALLER)
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "rate_limit_exceeded", 30)
    assert caught.value.headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    assert recorder.get(metrics.QUOTA_REFUSALS, limit="requests") == 1
    clock.now += 30
    await quotas.take_request(CALLER)


async def commits(*sizes: int) -> AsyncIterator[Commit]:
    for size in sizes:
        yield Commit((1,) * size, "x")


async def left(quotas: Quotas) -> float:
    await quotas.settle()
    try:
        headers = await quotas.take_prompt(CALLER, 0)
    except QuotaError as error:
        return 100 - error.retry_after_s * 100 / PERIOD_S - 100
    return float(headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize(("taken", "charged"), [(3, 60), (1, 10), (2, 30)])
async def test_prompts_are_charged_before_and_answers_behind(taken: int, charged: int) -> None:
    """Also those of clients that leave: what was made is charged, and no more."""
    quotas = Quotas(Recorder(), clock=Clock())
    await quotas.take_prompt(CALLER, 20)
    stream: Any = quotas.metered(CALLER, commits(10, 20, 30))
    for _ in range(taken):
        await anext(stream)
    if taken == 3:
        assert await anext(stream, None) is None
    await stream.aclose()
    assert await left(quotas) == 80 - charged


async def test_an_answer_may_leave_a_debt() -> None:
    clock = Clock()
    quotas = Quotas(Recorder(), clock=clock)
    quotas.charge_answer(CALLER, 150)
    await quotas.settle()
    with pytest.raises(QuotaError) as caught:
        await quotas.take_prompt(CALLER, 10)
    assert caught.value.retry_after_s == 36
    assert caught.value.headers["x-ratelimit-remaining-tokens"] == "0"
    clock.now += 36
    await quotas.take_prompt(CALLER, 10)


class Broken:
    """Buckets that fail."""

    def __init__(self, error: Exception = OSError()) -> None:  # noqa: B008
        self.error = error
        self.asked = 0

    async def take(self, name: str, cost: float, per_minute: int, *, debt: bool = False) -> Level:
        self.asked += 1
        raise self.error


@pytest.mark.parametrize("error", [OSError("CANARY"), ValueError("CANARY"), StoreError("CANARY")])
async def test_trouble_with_the_shared_buckets_fails_no_request(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    recorder, clock, shared = Recorder(), Clock(), Broken(error)
    quotas = Quotas(recorder, shared, retry_s=5, clock=clock)
    await quotas.take_request(CALLER)
    await quotas.take_request(CALLER)
    with pytest.raises(QuotaError):
        await quotas.take_request(CALLER)
    assert shared.asked == 1, "it is left alone for a while"
    assert recorder.get(metrics.QUOTA_FALLBACKS) == 1
    clock.now += 5
    with pytest.raises(QuotaError):
        await quotas.take_request(CALLER)
    assert shared.asked == 2
    assert "CANARY" not in caplog.text
    assert "key-hash" not in caplog.text


async def test_redis_that_freezes_dies_and_comes_back(server: RedisServer) -> None:
    clock = Clock()
    quotas = Quotas(Recorder(), of(server, 0.2), retry_s=5, clock=clock)
    with server.client() as client:
        client.flushall()
    await quotas.take_request(CALLER)
    server.freeze()
    assert (await quotas.take_request(CALLER))["x-ratelimit-remaining-requests"] == "1", "counted here alone"
    server.thaw()
    server.kill()
    clock.now += 5
    await quotas.take_request(CALLER)
    server.start()
    clock.now += 60
    assert (await quotas.take_request(CALLER))["x-ratelimit-remaining-requests"] == "1"
    with server.client() as client:
        assert len(client.keys()) == 1


@given(st.integers(1, 10**6), st.floats(-1e6, 1e6))
def test_headers_are_whole_numbers_and_times(limit: int, left: float) -> None:
    headers = rate_headers("tokens", limit, min(left, limit))
    assert 0 <= int(headers["x-ratelimit-remaining-tokens"]) <= limit
    reset = headers["x-ratelimit-reset-tokens"]
    assert reset.endswith(("ms", "s"))
    assert all(part.replace(".", "").isdigit() for part in reset.rstrip("ms").replace("m", " ").split())


@pytest.mark.parametrize(
    ("left", "reset"),
    [(60, "0ms"), (59.9, "100ms"), (58.5, "1.5s"), (0, "1m0s"), (-30, "1m30s"), (0.001, "60s"), (-3540, "60m0s")],
)
def test_times_are_written_as_clients_read_them(left: float, reset: str) -> None:
    assert rate_headers("requests", 60, left)["x-ratelimit-reset-requests"] == reset
