"""Two routers over one fleet and one store: conversations stay where their cache is, and survive what happens there.

B23 clients that leave, B25 replicas that drain, die, hang and come back, B29 gauges that go back to 0.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from eagle2.config import AdmissionSettings, RoutingSettings
from eagle2.router.api import create_app
from eagle2.router.settings import RouterSettings
from eagle2.session.breaker import GuardedStore
from eagle2.session.memory import MemorySessionStore
from eagle2.session.session import session_of
from fakes.fleet import FakeFleet
from fakes.http_routers import HttpRouters, Prompt, right, two_clients
from fakes.stores import DownStore
from fakes.verifier import describe


@dataclass
class Pair(HttpRouters):
    """Two routers over one fleet and one store."""

    store: MemorySessionStore

    async def owner(self, session: str) -> str | None:
        """The incarnation that owns a session of callers without a key."""
        found = session_of("anonymous", header=session)
        assert found is not None
        entry = await self.store.session(found.name)
        return None if entry is None else entry.owner.incarnation

    async def gauge(self, router: int, name: str) -> float:
        lines = (await self.clients[router].get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"eagle2_{name}"))


@asynccontextmanager
async def pair(fleet: FakeFleet, *, sockets: bool = False, **routing: Any) -> AsyncIterator[Pair]:
    """``sockets``: behind real connections, so that clients can leave."""
    shared = MemorySessionStore(600)
    settings = RoutingSettings(**{"progress_timeout_s": 0.4, "failover_wait_s": 5.0, **routing})

    def store() -> GuardedStore:
        return GuardedStore(MemorySessionStore(600, beside=shared), 0.05)

    async with two_clients(fleet, store, settings, sockets=sockets) as clients:
        yield Pair(fleet, clients, shared)


async def eventually(condition: Any, seconds: float = 10.0) -> bool:
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return bool(condition())


def prompts(count: int) -> list[Prompt]:
    return [(n % 256, n // 256, *range(60)) for n in range(count)]


@pytest.mark.parametrize("move", [False, True])
async def test_draining_one_of_four_replicas(move: bool) -> None:
    """B25 A: no new request, running streams finish or move, sessions move."""
    async with pair(FakeFleet(4, pace_s=0.01)) as two:
        asked = prompts(20)
        answers = await asyncio.gather(*(two.ask(n % 2, p, f"s{n}") for n, p in enumerate(asked)))
        assert all(map(right, asked, answers))
        owners = {f"s{n}": await two.owner(f"s{n}") for n in range(20)}
        victim = two.fleet.at(str(Counter(owners.values()).most_common(1)[0][0]).partition(".")[0])
        running = [asyncio.create_task(two.ask(n % 2, p, f"s{n}")) for n, p in enumerate(asked)]
        assert await eventually(lambda: victim.running)
        before = victim.started
        two.fleet.drain(victim.identity.uid, move=move)
        assert all(map(right, asked, await asyncio.gather(*running)))
        assert all(map(right, asked, await asyncio.gather(*(two.ask(n % 2, p, f"s{n}") for n, p in enumerate(asked)))))
        # Requests that were on their way when it began have come; after it, none.
        assert victim.started <= before + 20
        late = victim.started
        assert all(map(right, asked, await asyncio.gather(*(two.ask(n % 2, p, f"s{n}") for n, p in enumerate(asked)))))
        assert victim.started == late
        assert victim.identity.incarnation not in {await two.owner(f"s{n}") for n in range(20)}
        kept = [s for s, owner in owners.items() if owner != victim.identity.incarnation]
        assert [await two.owner(s) for s in kept] == [owners[s] for s in kept], "the others stay where they are"


async def test_killing_a_replica_moves_its_sessions() -> None:
    """B25 B: the next turn is answered elsewhere, where its prompt is read again."""
    async with pair(FakeFleet(4)) as two:
        asked = prompts(20)
        for n, prompt in enumerate(asked):
            assert right(prompt, await two.ask(n % 2, prompt, f"s{n}"))
        owners = [await two.owner(f"s{n}") for n in range(20)]
        victim = two.fleet.at("r1")
        two.fleet.kill("r1")
        for n, prompt in enumerate(asked):
            answer = await two.ask((n + 1) % 2, prompt, f"s{n}")
            assert right(prompt, answer)
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            moved = owners[n] == victim.identity.incarnation
            assert (cached == 0) == moved, "the other router found the owner that the first one chose"
            assert (await two.owner(f"s{n}") != owners[n]) == moved
        assert victim.identity.incarnation in owners


async def test_a_hung_replica_holds_up_its_own_requests_only() -> None:
    """B25 C: they go on elsewhere; nobody is sent there for a while."""
    async with pair(FakeFleet(4, pace_s=0.002)) as two:
        asked = prompts(20)
        for n, prompt in enumerate(asked):
            assert right(prompt, await two.ask(n % 2, prompt, f"s{n}"))
        victim = two.fleet.at("r2")
        held = {n for n in range(20) if await two.owner(f"s{n}") == victim.identity.incarnation}
        assert held
        two.fleet.hang("r2")
        answers = await asyncio.gather(*(two.ask(n % 2, p, f"s{n}") for n, p in enumerate(asked)))
        assert all(map(right, asked, answers))
        again = [r.prompt_ids[0] for life in two.fleet.lives for r in life.requests if r.attempt]
        assert sorted(again) == sorted(held), "nobody else was disturbed"
        started = victim.started
        answers = await asyncio.gather(*(two.ask(n % 2, p, f"s{n}") for n, p in enumerate(asked)))
        assert all(map(right, asked, answers))
        assert victim.started == started


async def test_requests_without_a_session_are_spread() -> None:
    """B25 D: no header, an empty one, and one that is too long."""
    async with pair(FakeFleet(4, pace_s=0.001)) as two:
        asked = prompts(500)
        gate = asyncio.Semaphore(24)

        async def ask(n: int) -> httpx.Response:
            async with gate:
                return await two.ask(n % 2, (n % 256, n // 256), None if n < 400 else "", max_tokens=4)

        answers = await asyncio.gather(*(ask(n) for n in range(len(asked))))
        assert {answer.status_code for answer in answers} == {200}
        started = [life.started for life in two.fleet.lives]
        assert sum(started) == 500
        assert max(started) <= 1.3 * sum(started) / 4, started
        for _ in range(100):
            refused = await two.ask(0, (1, 2), "x" * 10_240)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "session_id_too_long")
        assert sum(life.started for life in two.fleet.lives) == 500


async def test_a_replica_that_comes_back_under_its_name_is_cold() -> None:
    """B25 E."""
    async with pair(FakeFleet(4)) as two:
        (prompt,) = prompts(1)
        assert right(prompt, await two.ask(0, prompt, "s"))
        owner = await two.owner("s")
        assert owner is not None
        uid = owner.partition(".")[0]
        two.fleet.restart(uid)
        answer = await two.ask(1, prompt, "s")
        assert right(prompt, answer)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert await two.owner("s") != owner
        metrics = (await two.clients[1].get("/metrics")).text
        assert 'router_placements_total{reason="owner"}' not in metrics
        again = await two.ask(0, prompt, "s")
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_first_requests_of_the_same_sessions_at_the_same_moment() -> None:
    """Two routers x 50 of 20 sessions: each session has one owner, and both routers send it there."""
    async with pair(FakeFleet(4, max_sequences=64, pace_s=0.002)) as two:
        calls = [(router, n % 20) for n in range(50) for router in range(2)]
        random.Random(5).shuffle(calls)
        answers = await asyncio.gather(
            *(two.ask(router, (session, place), f"s{session}") for place, (router, session) in enumerate(calls))
        )
        assert {answer.status_code for answer in answers} == {200}
        served: dict[int, set[str]] = defaultdict(set)
        for life in two.fleet.lives:
            for request in life.requests:
                served[request.prompt_ids[0]].add(life.identity.incarnation)
        assert {n: {await two.owner(f"s{n}")} for n in range(20)} == dict(served)


async def _conversations(affinity: str, *, chats: int = 24, turns: int = 6) -> tuple[float, float]:
    """Cached share of all prompt tokens but the first turns' own, and the most loaded replica by the mean."""
    async with pair(FakeFleet(4, pace_s=0.001, description=describe(max_model_len=4096)), affinity=affinity) as two:
        draw = random.Random(1)

        async def chat(number: int) -> None:
            history: Prompt = (number, *(draw.randrange(256) for _ in range(48)))
            for turn in range(turns):
                answer = await two.ask((number + turn) % 2, history, f"s{number}")
                assert right(history, answer)
                history += (*answer.json()["choices"][0]["token_ids"], *(draw.randrange(256) for _ in range(48)))

        await asyncio.gather(*(chat(number) for number in range(chats)))
        lives = two.fleet.lives
        started = [life.started for life in lives]
        cached = sum(life.cached_tokens for life in lives) / sum(life.prompt_tokens for life in lives)
        return cached, max(started) / (sum(started) / len(started))


async def test_affinity_finds_what_was_read() -> None:
    with_affinity, load = await _conversations("session")
    at_random, _ = await _conversations("random")
    print(f"cached share {with_affinity:.3f} with affinity, {at_random:.3f} at random; max/mean {load:.2f}")
    assert with_affinity > 0.6
    assert with_affinity > 1.5 * at_random
    assert load <= 1.5


@pytest.mark.parametrize("down", [False, True])
async def test_a_store_that_is_down_costs_affinity_only(down: bool) -> None:
    fleet = FakeFleet(4)
    store = GuardedStore(DownStore() if down else MemorySessionStore(600), 3600)
    app = create_app(fleet, RouterSettings(), store=store, routing=RoutingSettings(), admission=AdmissionSettings())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        two = Pair(fleet, [client], MemorySessionStore(600))
        for _ in range(3):
            for n, prompt in enumerate(prompts(8)):
                assert right(prompt, await two.ask(0, prompt, f"s{n}"))
        ready = await client.get("/ready")
        assert ready.status_code == 200
        assert ready.json().get("degraded", []) == (["session_store"] if down else [])
        assert await two.gauge(0, "router_session_store_up") == (0.0 if down else 1.0)
        # By its name alone a session still goes to one replica.
        served = defaultdict(set)
        for life in fleet.lives:
            for request in life.requests:
                served[request.prompt_ids[0]].add(life.identity.uid)
        assert {len(uids) for uids in served.values()} == {1}
        for life in fleet.lives:
            life.turn("dead")
        fleet.notice()
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "not_ready")
    await store.close()


async def _leave_at(tasks: Sequence[asyncio.Task[Any]], seconds: float) -> None:
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_clients_that_leave_free_everything_and_normal_ends_abort_nothing() -> None:
    """B23 through two routers: streams, whole answers, and some that still wait in the queue."""
    fleet = FakeFleet(2, max_sequences=6, pace_s=0.02, description=describe(max_model_len=4096))
    async with pair(fleet, sockets=True) as two:
        fields = {"max_tokens": 2000, "ignore_eos": True}
        tasks = [asyncio.create_task(two.ask(n % 2, (n,), f"s{n}", stream=n < 15, **fields)) for n in range(30)]
        assert await eventually(lambda: fleet.running >= 12)
        await _leave_at(tasks, 0.3)
        assert await eventually(lambda: fleet.running == 0)
        started = sum(life.started for life in fleet.lives)
        for router in range(2):
            for gauge in ("router_queue_depth", "router_places_held", "router_requests_running"):
                assert await two.gauge(router, gauge) == 0.0, gauge
        aborted = sum(life.aborted for life in fleet.lives)
        assert aborted == started
        answers = await asyncio.gather(*(two.ask(n % 2, (n % 256, 1), None, max_tokens=3) for n in range(200)))
        assert {answer.status_code for answer in answers} == {200}
        assert sum(life.aborted for life in fleet.lives) == aborted
        assert sum(life.started for life in fleet.lives) == started + 200


async def test_gauges_are_zero_after_clients_left_the_queue() -> None:
    """B29: 200 requests, all clients gone before their requests got a place."""
    fleet = FakeFleet(1, max_sequences=1, pace_s=0.02, description=describe(max_model_len=4096))
    async with pair(fleet, sockets=True) as two:
        blocker = asyncio.create_task(two.ask(0, (0,), "s", max_tokens=4000, ignore_eos=True))
        assert await eventually(lambda: fleet.running == 1)
        tasks = [asyncio.create_task(two.ask(0, (n % 256,), f"s{n}", stream=n % 2 == 0)) for n in range(200)]
        async with asyncio.timeout(20):
            while await two.gauge(0, "router_queue_depth") < 200:
                await asyncio.sleep(0.01)
        await _leave_at(tasks, 0)
        async with asyncio.timeout(20):
            while await two.gauge(0, "router_queue_depth"):
                await asyncio.sleep(0.01)
        assert await two.gauge(0, "router_places_held") == 1.0
        blocker.cancel()
        async with asyncio.timeout(20):
            while await two.gauge(0, "router_places_held") or fleet.running:
                await asyncio.sleep(0.01)
        assert await two.gauge(0, "router_queued_work_seconds") == 0.0
        assert await two.gauge(0, "router_in_flight_work_seconds") == 0.0
        assert fleet.lives[0].started == 1
        assert right((5,), await two.ask(0, (5,), "s5"))
