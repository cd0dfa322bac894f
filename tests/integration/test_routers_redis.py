"""Routers over HTTP with a real Redis between them: first claims at one moment, and B28, a Redis that goes away."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from eagle2.config import RoutingSettings, SessionSettings
from eagle2.session.stores import create_store
from fakes.fleet import FakeFleet
from fakes.http_routers import HttpRouters, right, two_clients
from fakes.redis_server import redis_server
from fakes.tcp_proxy import TcpProxy

PATIENCE_S = 20.0  # for an answer of the store where one comes; the default of 0.1 is too little for a busy machine
SESSIONS = 20
RECOVERY_S = 10.0


class Routers(HttpRouters):
    """Two routers over one fleet, each with its own connections to a Redis."""

    async def all_right(self, count: int, first: int = 0) -> list[float]:
        """``count`` turns, one after the other, with whole undisturbed answers. Returns the seconds of each."""
        seconds = []
        for n in range(first, first + count):
            prompt = (n % SESSIONS, *range(70))
            began = time.monotonic()
            answer = await self.ask(n % len(self.clients), prompt, f"s{n % SESSIONS}")
            seconds.append(time.monotonic() - began)
            assert right(prompt, answer)
        return seconds

    async def are_degraded(self) -> bool:
        """Whether all say so; all must be ready in any case."""
        ready = [await client.get("/ready") for client in self.clients]
        assert [answer.status_code for answer in ready] == [200] * len(ready)
        said = [answer.json().get("degraded", []) for answer in ready]
        gauges = [(await client.get("/metrics")).text for client in self.clients]
        for degraded, text in zip(said, gauges, strict=True):
            assert f"eagle2_router_session_store_up {0 if degraded else 1}" in text
        return said == [["session_store"]] * len(said)

    async def are_whole(self) -> bool:
        ready = [await client.get("/ready") for client in self.clients]
        return all(answer.status_code == 200 and not answer.json().get("degraded") for answer in ready)

    def served(self) -> dict[int, set[str]]:
        """By the session's number, which replicas its turns went to since the fleet forgot."""
        found: dict[int, set[str]] = defaultdict(set)
        for life in self.fleet.lives:
            for request in life.requests:
                found[request.prompt_ids[0]].add(life.identity.incarnation)
        return dict(found)

    def forget(self) -> None:
        for life in self.fleet.lives:
            life.requests.clear()


@asynccontextmanager
async def routers(url: str, fleet: FakeFleet, *, timeout_s: float = PATIENCE_S) -> AsyncIterator[Routers]:
    """Two of them. Their stores are closed by the apps themselves."""
    settings = SessionSettings(store=url, timeout_s=timeout_s, retry_s=0.2)
    async with two_clients(fleet, lambda: create_store(settings), RoutingSettings()) as clients:
        yield Routers(fleet, clients)


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_first_requests_of_the_same_sessions_at_the_same_moment() -> None:
    """Two routers x 50 of 20 sessions: each session has one owner, and both routers send it there."""
    with redis_server() as server:
        async with routers(server.url, FakeFleet(4, max_sequences=64, pace_s=0.002)) as two:
            calls = [(router, n % SESSIONS) for n in range(50) for router in range(2)]
            random.Random(5).shuffle(calls)
            answers = await asyncio.gather(
                *(two.ask(router, (session, place), f"s{session}") for place, (router, session) in enumerate(calls))
            )
            assert {answer.status_code for answer in answers} == {200}
            served = two.served()
            assert sorted(served) == list(range(SESSIONS))
            assert {len(replicas) for replicas in served.values()} == {1}, served
            assert await two.are_whole()


async def check_affinity(two: Routers, owners: dict[int, set[str]]) -> None:
    two.forget()
    await two.all_right(2 * SESSIONS)
    assert two.served() == owners, "the owners are those of before"


def report(**seconds: float) -> None:
    print(", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items()))


async def test_b28_redis_stops_and_comes_back() -> None:
    """(A): nobody sees it; with Redis again, sessions have owners again, without a restart of a router."""
    with redis_server() as server:
        async with routers(server.url, FakeFleet(4)) as two:
            usual = await two.all_right(2 * SESSIONS)
            owners = two.served()
            assert {len(replicas) for replicas in owners.values()} == {1}
            assert await two.are_whole()
            server.stop()
            without = await two.all_right(100)
            assert await two.are_degraded()
            server.start()
            began = time.monotonic()
            await until(two.are_whole, RECOVERY_S)
            back = time.monotonic() - began
            # The store came back empty: what is claimed now counts.
            two.forget()
            await two.all_right(2 * SESSIONS)
            new = two.served()
            assert {len(replicas) for replicas in new.values()} == {1}
            await check_affinity(two, new)
            report(usual=max(usual), first_without=without[0], later_without=max(without[2:]), back=back)


async def test_b28_redis_in_a_black_hole() -> None:
    """(B): a router's first requests wait for the store's time limit, all others for nothing."""
    timeout_s = 0.8
    with redis_server() as server:
        async with TcpProxy(server.port) as proxy, routers(proxy.url, FakeFleet(4), timeout_s=timeout_s) as two:
            usual = await two.all_right(2 * SESSIONS)
            owners = two.served()
            proxy.black_hole = True
            first = await two.all_right(4)
            await until(two.are_degraded, 20 * timeout_s)
            later = await two.all_right(100)
            assert await two.are_degraded()
            # A hundred that each waited would take 80 seconds; what is asserted is that they did not all wait.
            assert sum(later) < 50 * timeout_s
            proxy.black_hole = False
            began = time.monotonic()
            await until(two.are_whole, RECOVERY_S)
            back = time.monotonic() - began
            await check_affinity(two, owners)
            report(usual=max(usual), first=max(first), later=max(later), back=back)
