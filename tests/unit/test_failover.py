"""Answers that survive: whatever happens to replicas, a client gets the undisturbed answer, each token once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.errors import RequestError, UnavailableError
from eagle2.protocol import Commit, GenerationRequest, Usage
from eagle2.router.affinity import rendezvous
from eagle2.router.answer import Answer
from eagle2.router.destinations import Route
from eagle2.router.failures import GenerationError
from eagle2.router.leases import ProbationLeases
from eagle2.router.single_fleet import SingleFleet
from eagle2.session.memory import MemorySessionStore
from eagle2.session.session import Session
from eagle2.telemetry import metrics
from fakes.fleet import Decoder, FakeFleet, fleet_request, undisturbed
from fakes.routing import FakeRouter, Received
from fakes.stores import DownStore
from fakes.verifier import ForcedVerifier

# Long enough to be cut everywhere, with characters of one to four bytes.
LONG = next(r for r in (fleet_request("x", seed=s, max_tokens=40) for s in range(99)) if len(undisturbed(r)[0]) == 40)


def first_choice(fleet: FakeFleet, request: GenerationRequest, session: str | None = "s") -> str:
    """Where a request goes while the store is down and nothing runs."""
    return rendezvous(session or request.request_id, fleet.replicas())[0].uid


def at(tokens: int, deed: Callable[[], None]) -> Callable[[Received], None]:
    """Do it once, as soon as the client has so many tokens."""
    done: list[bool] = []

    def look(received: Received) -> None:
        if len(received.ids) >= tokens and not done:
            done.append(True)
            deed()

    return look


ROUTE = Route(Session("s"))


@pytest.mark.parametrize("fault", ["kill", "hang", "drain", "restart"])
async def test_an_answer_goes_on_elsewhere(fault: str) -> None:
    fleet = FakeFleet(3)
    router = FakeRouter(fleet, DownStore())
    uid = first_choice(fleet, LONG)
    deeds: dict[str, Callable[[], Any]] = {
        "kill": lambda: fleet.kill(uid),
        "hang": lambda: fleet.hang(uid),
        "drain": lambda: fleet.drain(uid, move=True),
        "restart": lambda: fleet.restart(uid),
    }
    received = await router.answer(LONG, ROUTE, on_commit=at(7, deeds[fault]))
    assert received.whole == undisturbed(LONG)
    reason = {"restart": "crash", "kill": "crash"}.get(fault, fault)
    assert router.count(metrics.FAILOVERS, reason=reason) == 1
    assert router.count(metrics.STREAMS_RESUMED) == 1
    assert router.recorder.snapshot()["router_failover_stall_seconds_count"] == 1
    again = next(r for life in fleet.lives for r in life.requests if r.attempt == 1)
    assert 7 <= len(again.output_ids) < 40
    assert list(again.output_ids) == received.ids[: len(again.output_ids)]
    assert (again.sampling, again.deadline, again.prompt_ids) == (LONG.sampling, LONG.deadline, LONG.prompt_ids)
    usage = received.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 40)
    assert usage.cycles + usage.accepted_prediction_tokens + 1 == 40
    assert not router.in_flight.counts()
    await asyncio.sleep(0)
    assert fleet.running == 0


@pytest.mark.parametrize("stop", [(), ("\U0001f600c",), ("zz", "  a"), (undisturbed(LONG)[1][12:19],)])
async def test_a_cut_at_every_position_is_not_seen(stop: tuple[str, ...]) -> None:
    """Also inside of characters, and inside of what may become a stop string."""
    request = replace(LONG, stop=replace(LONG.stop, stop_strings=stop))
    expected = undisturbed(request)
    lags = 0
    for cut in range(1, len(expected[0])):
        fleet = FakeFleet(2, seed=cut)
        router = FakeRouter(fleet, DownStore())
        uid = first_choice(fleet, request)
        received = await router.answer(request, ROUTE, on_commit=at(cut, lambda: fleet.kill(uid)))  # noqa: B023
        assert received.whole == expected, cut
        again = [r for life in fleet.lives for r in life.requests if r.attempt == 1]
        lags += any(r.characters_released < len(bytes(r.output_ids).decode(errors="replace")) for r in again)
        assert router.count(metrics.STREAMS_RESUMED) == len(again)
    assert lags or not stop


async def test_a_cut_within_a_held_back_stop_string() -> None:
    """The text lags behind the ids at the moment of the crash, and comes out once."""
    text = undisturbed(LONG)[1]
    for start in range(4, 10):
        stop = text[start : start + 6] + "\x00"  # never complete: all of it is held back, then released
        request = replace(LONG, stop=replace(LONG.stop, stop_strings=(stop,)))
        expected = undisturbed(request)
        fleet, held = FakeFleet(2), 0

        def look(received: Received, fleet: FakeFleet = fleet, stop: str = stop) -> None:
            nonlocal held
            whole = bytes(t for t in received.ids if t < 256).decode(errors="ignore")
            if len(whole) - len(received.text) >= 3 and not held:
                held = 1
                fleet.kill(first_choice(fleet, LONG))

        received = await FakeRouter(fleet, DownStore()).answer(request, ROUTE, on_commit=look)
        assert received.whole == expected
        assert held


async def test_before_the_first_token_nothing_is_seen_either() -> None:
    fleet = FakeFleet(3)
    router = FakeRouter(fleet, DownStore())
    fleet.kill(first_choice(fleet, LONG))
    assert (await router.answer(LONG, ROUTE)).whole == undisturbed(LONG)
    assert router.count(metrics.STREAMS_RESUMED) == 0
    assert "router_failover_stall_seconds_count" not in router.recorder.snapshot()


async def test_one_dead_replica_is_asked_once() -> None:
    fleet = FakeFleet(3)
    router = FakeRouter(fleet, DownStore())
    fleet.kill("r0")
    answers = await asyncio.gather(*(router.answer(fleet_request(f"q{n}", (n, 1), seed=n)) for n in range(12)))
    assert all(answer.finish_reason for answer in answers)
    failed = router.count(metrics.FAILOVERS, reason="crash")
    for n in range(12, 40):
        await router.answer(fleet_request(f"q{n}", (n, 1), seed=n))
    assert router.count(metrics.FAILOVERS, reason="crash") == failed, "it is kept away from"


async def test_drains_are_no_failures() -> None:
    """A rollout may move one answer more often than it may be tried again."""
    fleet = FakeFleet(1)
    router = FakeRouter(fleet, DownStore(), max_attempts=1, retry_burst=0, retry_share=0.0)
    uids = iter(range(1, 9))

    def move(received: Received) -> None:
        number = next(uids, None)
        if number is not None:
            fleet.start(f"r{number}")
            fleet.drain(f"r{number - 1}", move=True)

    received = await router.answer(LONG, ROUTE, on_commit=move)
    assert received.whole == undisturbed(LONG)
    assert router.count(metrics.FAILOVERS, reason="drain") == 8


async def test_attempts_are_bounded() -> None:
    fleet = FakeFleet(6)
    router = FakeRouter(fleet, DownStore(), max_attempts=3)

    def kill_all(_: Received) -> None:
        for life in fleet.lives:
            if life.running:
                life.turn("hung")

    with pytest.raises(UnavailableError, match="tried 3 times"):
        await router.answer(LONG, ROUTE, on_commit=kill_all)
    assert router.count(metrics.RETRIES_REFUSED, reason="attempts") == 1
    assert max(r.attempt for life in fleet.lives for r in life.requests) == 2


async def test_retries_are_bounded_over_all_requests() -> None:
    fleet = FakeFleet(4)
    router = FakeRouter(fleet, DownStore(), retry_burst=2, retry_share=0.0)
    for uid in ("r0", "r1", "r2", "r3"):
        fleet.hang(uid)
    results = await asyncio.gather(
        *(router.answer(fleet_request(f"q{n}", (n, 1))) for n in range(8)), return_exceptions=True
    )
    assert all(isinstance(result, UnavailableError) for result in results)
    assert sum(life.started for life in fleet.lives) <= 8 + 2
    assert router.count(metrics.RETRIES_REFUSED, reason="budget") >= 6


async def test_without_any_replica_the_answer_ends_in_an_error_and_says_so() -> None:
    fleet = FakeFleet(2)
    router = FakeRouter(fleet, DownStore(), failover_wait_s=0.05)
    received = Received()

    def kill(grown: Received) -> None:
        received.ids = list(grown.ids)
        for life in fleet.lives:
            life.turn("dead")
        fleet.notice()

    with pytest.raises(UnavailableError, match="gone"):
        await router.answer(LONG, ROUTE, on_commit=kill)
    assert received.ids == undisturbed(LONG)[0][: len(received.ids)]
    assert router.count(metrics.RETRIES_REFUSED, reason="no_replica") == 1


async def test_an_interrupted_answer_waits_for_a_replacement() -> None:
    fleet = FakeFleet(1)
    router = FakeRouter(fleet, DownStore())

    def kill() -> None:
        fleet.kill("r0", noticed=True)
        asyncio.get_running_loop().call_later(0.15, lambda: fleet.start("r0"))

    assert (await router.answer(LONG, ROUTE, on_commit=at(5, kill))).whole == undisturbed(LONG)


async def test_a_deadline_holds_while_nobody_can_go_on() -> None:
    fleet = FakeFleet(1)
    router = FakeRouter(fleet, DownStore(), failover_wait_s=60)
    request = replace(LONG, deadline=time.time() + 0.3)
    with pytest.raises(GenerationError) as info:
        await router.answer(request, ROUTE, on_commit=at(5, lambda: fleet.kill("r0", noticed=True)))
    assert info.value.code == "deadline_exceeded"


async def test_what_the_replica_refuses_is_told_as_it_is() -> None:
    refusal = RequestError("logit_bias names the token 9, which does not exist.", param="logit_bias")
    router = FakeRouter(SingleFleet(ForcedVerifier(before=refusal), 8), DownStore())
    with pytest.raises(RequestError) as info:
        await router.answer(fleet_request("a"))
    assert info.value is refusal
    assert router.count(metrics.PLACEMENTS, reason="load") == 1


async def test_errors_of_the_generation_are_no_reason_to_try_again() -> None:
    verifier = ForcedVerifier(error="The model's output is not a number.", error_code="generation_failed")
    router = FakeRouter(SingleFleet(verifier, 8), DownStore())
    received = await router.answer(fleet_request("a"))
    assert received.finish_reason == "error"
    assert len(verifier.requests) == 1


@pytest.mark.parametrize(("code", "reason"), [("verifier_failed", "crash"), ("verifier_stopped", "drain")])
async def test_an_engine_that_ends_is_a_replica_that_ends(code: Any, reason: str) -> None:
    verifier = ForcedVerifier(["ab"], error="The engine has ended.", error_code=code)
    router = FakeRouter(SingleFleet(verifier, 8), DownStore(), failover_wait_s=0)
    with pytest.raises(UnavailableError, match="engine has ended"):
        await router.answer(fleet_request("a"))
    assert router.count(metrics.FAILOVERS, reason=reason) == 1


async def test_a_stream_that_just_ends_goes_on_elsewhere() -> None:
    class Forgetful(FakeFleet):
        async def generate(self, replica: Any, request: GenerationRequest) -> AsyncIterator[Commit]:
            async for commit in super().generate(replica, request):
                if request.attempt == 0 and len(commit.token_ids) > 1:
                    return
                yield commit

    router = FakeRouter(Forgetful(2), DownStore())
    assert (await router.answer(LONG, ROUTE)).whole == undisturbed(LONG)
    assert router.count(metrics.FAILOVERS, reason="end") == 1


async def test_a_reader_that_leaves_leaves_nothing_behind() -> None:
    fleet = FakeFleet(2, pace_s=0.01)
    router = FakeRouter(fleet, DownStore())
    for count in range(1, 6):
        stream = cast("Any", router.verifier.generate(replace(LONG, request_id=f"q{count}"), ROUTE))
        async with aclosing(stream):
            await anext(stream)
            assert sum(router.in_flight.counts().values()) == 1
        assert fleet.running == 0
        assert not router.in_flight.counts()
        assert sum(life.aborted for life in fleet.lives) == count
    assert router.count(metrics.PLACES_HELD) == 0


async def test_a_normal_end_is_no_abort() -> None:
    fleet = FakeFleet(2)
    router = FakeRouter(fleet, DownStore())
    await asyncio.gather(*(router.answer(fleet_request(f"q{n}", (n,), seed=n)) for n in range(40)))
    assert sum(life.aborted for life in fleet.lives) == 0
    assert sum(life.finished for life in fleet.lives) == 40


async def test_a_replica_that_hangs_when_let_go_holds_nobody_up() -> None:
    class Sticky(FakeFleet):
        async def generate(self, replica: Any, request: GenerationRequest) -> AsyncIterator[Commit]:
            try:
                async for commit in super().generate(replica, request):
                    yield commit
            except UnavailableError:
                await asyncio.sleep(3600)

    fleet = Sticky(2)
    router = FakeRouter(fleet, DownStore())
    async with asyncio.timeout(30):
        received = await router.answer(LONG, ROUTE, on_commit=at(5, lambda: fleet.kill(first_choice(fleet, LONG))))
    assert received.whole == undisturbed(LONG)
    assert router.count(metrics.FAILOVERS, reason="hang") == 1


@pytest.mark.parametrize("after", [0, 1, 9])
@pytest.mark.parametrize("replicas", [1, 3])
async def test_a_poison_request_crashes_two_replicas_and_the_innocent_go_on(after: int, replicas: int) -> None:
    fleet = FakeFleet(
        replicas, max_sequences=12, pace_s=0.002, poison=lambda r: r.prompt_ids[0] == 13, poison_after=after
    )
    router = FakeRouter(fleet, DownStore(), failover_wait_s=20, progress_timeout_s=20)

    async def replace_the_dead() -> None:
        while True:
            await asyncio.sleep(0.02)
            for life in list(fleet.lives):
                if life.state == "dead" and fleet.at(life.identity.uid) is life:
                    fleet.start(life.identity.uid)

    replacing = asyncio.create_task(replace_the_dead())
    requests = [fleet_request(f"q{n}", (n, 5), seed=n, max_tokens=24) for n in range(10, 20)]
    bad = next(r for r in (fleet_request("bad", (13, s)) for s in range(99)) if len(undisturbed(r)[0]) > 10)
    requests[3] = bad
    try:
        async with asyncio.timeout(60):
            results = await asyncio.gather(*(router.answer(r) for r in requests), return_exceptions=True)
    finally:
        replacing.cancel()
    for request, result in zip(requests, results, strict=True):
        if request is bad:
            assert isinstance(result, RequestError)
            assert (result.status, result.code) == (400, "request_quarantined")
        else:
            assert isinstance(result, Received), result
            assert result.whole == undisturbed(request)
    assert len(fleet.crashes) == 2
    assert router.count(metrics.REQUESTS_QUARANTINED) == 1
    with pytest.raises(RequestError, match="crashed"):
        await router.answer(replace(bad, request_id="again"))
    assert len(fleet.crashes) == 2


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_whatever_happens_every_finished_answer_is_the_undisturbed_one(seed: int) -> None:
    """Many streams over four replicas that die, hang, drain, restart and wake at random."""
    asyncio.run(_storm(random.Random(seed)))


def _harm(fleet: FakeFleet, uid: str, draw: random.Random) -> None:
    if fleet.at(uid).state != "up":
        fleet.start(uid)
        return
    deeds: list[Callable[[], Any]] = [
        lambda: fleet.kill(uid, noticed=draw.random() < 0.5),
        lambda: fleet.hang(uid),
        lambda: fleet.drain(uid, move=draw.random() < 0.5),
        lambda: fleet.restart(uid),
    ]
    draw.choice(deeds)()


async def _storm(draw: random.Random) -> None:
    fleet = FakeFleet(4, pace_s=0.001, seed=draw.randrange(1 << 30))
    router = FakeRouter(
        fleet, DownStore(), progress_timeout_s=0.06, max_attempts=30, retry_burst=1000, failover_wait_s=20
    )
    requests = [
        fleet_request(
            f"q{n}",
            (n, draw.randrange(256)),
            seed=draw.randrange(1 << 64),
            max_tokens=draw.randint(1, 60),
            stop=draw.choice([(), ("ab",), ("  ",), ("\u6f22",)]),
        )
        for n in range(24)
    ]

    async def trouble() -> None:
        while True:
            await asyncio.sleep(draw.uniform(0.005, 0.03))
            _harm(fleet, f"r{draw.randrange(4)}", draw)

    troubling = asyncio.create_task(trouble())
    try:
        async with asyncio.timeout(60):
            results = await asyncio.gather(
                *(router.answer(r, Route(Session(f"s{n % 5}"))) for n, r in enumerate(requests)), return_exceptions=True
            )
    finally:
        troubling.cancel()
    finished = 0
    for request, result in zip(requests, results, strict=True):
        if isinstance(result, Received):
            finished += 1
            assert result.whole == undisturbed(request)
            assert result.usage is not None
            assert result.usage.completion_tokens == len(result.ids)
        else:
            # A random death may hit a suspect on its probation; nothing else may end an answer here.
            assert isinstance(result, RequestError), result
            assert result.code == "request_quarantined"
    assert finished >= len(requests) // 2
    assert not router.in_flight.counts()
    assert router.count(metrics.PLACES_HELD) == 0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.data())
def test_usage_of_parts_is_that_of_the_whole(sizes: list[int], data: st.DataObject) -> None:
    """Where nothing is lost on the way, a broken answer has the cycles and accepted tokens of an unbroken one."""
    request = fleet_request("a", max_tokens=sum(sizes) + 1)
    answer, unbroken = Answer(request), Usage(3, sum(sizes) + 1, 0, sum(s - 1 for s in sizes), 5, len(sizes))
    answer.begin()
    answer.take(Commit((1,), "a"))
    cycles = accepted = 0  # of the running attempt
    for place, size in enumerate(sizes):
        if data.draw(st.booleans()):
            again = answer.begin()
            assert len(again.output_ids) == again.characters_released == 1 + sum(sizes[:place])
            cycles = accepted = 0
        cycles, accepted = cycles + 1, accepted + size - 1
        if place < len(sizes) - 1:
            answer.take(Commit((1,) * size, "a" * size))
    last = Usage(3, sum(sizes) + 1, 0, accepted, 5, cycles)
    assert answer.take(Commit((1,) * sizes[-1], "a" * sizes[-1], "length", last)).usage == unbroken


def test_the_fake_continues_as_it_began() -> None:
    whole = undisturbed(LONG)
    for cut in range(1, 39):
        decoder = Decoder(LONG)
        ids, text = decoder.commit(cut)
        again = Decoder(replace(LONG, output_ids=ids, characters_released=len(text)))
        rest, more = again.commit(100)
        assert (list(ids + rest), text + more, again.finish_reason) == whole


@pytest.mark.parametrize("seed", range(6))
async def test_routers_that_share_a_store_blame_no_innocent(seed: int) -> None:
    """Each knows its own suspects only; a lease keeps them from trying two on one replica."""
    draw = random.Random(seed)
    fleet = FakeFleet(3, max_sequences=16, pace_s=0.002, poison=lambda r: r.prompt_ids[0] == 13, poison_after=2)
    shared = MemorySessionStore(600)
    routers = [
        FakeRouter(fleet, MemorySessionStore(600, beside=shared), failover_wait_s=20, progress_timeout_s=20)
        for _ in range(2)
    ]
    bad = next(r for r in (fleet_request("bad", (13, s)) for s in range(99)) if len(undisturbed(r)[0]) > 10)
    requests = [bad, *(fleet_request(f"q{n}", (n, 5), seed=n, max_tokens=24) for n in range(20, 38))]
    draw.shuffle(requests)
    async with asyncio.timeout(60):
        results = await asyncio.gather(
            *(routers[n % 2].answer(r) for n, r in enumerate(requests)), return_exceptions=True
        )
    for request, result in zip(requests, results, strict=True):
        if request is bad:
            assert isinstance(result, RequestError)
        else:
            assert isinstance(result, Received), result
            assert result.whole == undisturbed(request)
    assert len(fleet.crashes) == 2
    await asyncio.sleep(0.01)
    assert await shared.sessions() == [], "leases are given back"


async def test_a_lease_of_a_router_that_is_gone_is_taken_over() -> None:
    now = 0.0
    shared = MemorySessionStore(600)
    gone, here = (ProbationLeases(shared, lasts_s=5, clock=lambda: now) for _ in range(2))
    assert await gone.take("a", "life")
    assert not await here.take("b", "life")
    now = 5.0
    assert not await here.take("b", "life")
    now = 5.1
    assert await here.take("b", "life")
    gone.give_back("a")
    await asyncio.sleep(0.01)
    assert not await gone.take("c", "life"), "what was taken over is not dropped by its old holder"
    here.give_back("b")
    assert await here.take("c", "life"), "one of the same router need not look twice"
    here.give_back("c")
    await asyncio.sleep(0.01)
    assert await gone.take("c", "life")
    assert await ProbationLeases(DownStore(), lasts_s=5, clock=lambda: now).take("d", "life")


async def test_a_suspect_waits_for_a_probation_rather_than_for_a_full_replica() -> None:
    fleet = FakeFleet(2, max_sequences=3, pace_s=0.005)
    router = FakeRouter(fleet, DownStore(), progress_timeout_s=20)
    requests = [fleet_request(f"q{n}", (n,), seed=n, max_tokens=150) for n in range(6)]
    requests = [replace(r, stop=replace(r.stop, ignore_eos=True)) for r in requests]
    running = [asyncio.create_task(router.answer(r)) for r in requests]
    async with asyncio.timeout(20):
        while fleet.running < 6 or any(not life.prompt_tokens for life in fleet.lives):
            await asyncio.sleep(0.001)
    assert [life.running for life in fleet.lives] == [3, 3]
    reborn = fleet.restart("r0")
    answers = await asyncio.gather(*running)
    assert [answer.whole for answer in answers] == [undisturbed(r) for r in requests]
    assert [r.attempt for r in reborn.requests] == [1, 1, 1]
    assert reborn.peak == 3, "one after another, but not each alone until its end"
