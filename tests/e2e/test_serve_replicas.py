"""Two pairs side by side: calls reach the verifier that they name, and a verifier that dies is noticed at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from e2e.server import free_port
from eagle2.errors import DrainingError, UnavailableError
from eagle2.operations.local_cluster import LocalCluster
from eagle2.operations.serve_command import read_config, settings_of, with_counts, with_settings
from eagle2.protocol import Commit, GenerationRequest, Replica, SamplingParams, StopConditions
from eagle2.router.pinning import pin
from eagle2.router.serve_fleet import ServeFleet

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_SHORT = GenerationRequest("r", "t", (1, 2, 3), SamplingParams(seed=1), StopConditions(max_tokens=4, ignore_eos=True))
_LONG = replace(_SHORT, stop=StopConditions(max_tokens=60000, ignore_eos=True))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def config(tiny_model: tuple[Path, Path], cluster: LocalCluster) -> dict[str, Any]:
    """Two verifiers, two proposers, and a router in front of them; deployed."""
    target, head = tiny_model
    document = with_counts(read_config(None), pairs=2, routers=1)
    model = {"target": str(target), "draft": str(head), "dtype": "float32"}
    flags = {"model": model, "engine": {"threads": 1, "max_sequences": 3}, "http": {"port": free_port()}}
    flags["routing"] = {"progress_timeout_s": 10.0}
    config = with_settings(document, settings_of(document, flags), cluster.directory)
    cluster.deploy(config)
    return config


@pytest.fixture
async def fleet(config: dict[str, Any]) -> ServeFleet:
    """With both replicas known."""
    from ray import serve

    deadline = time.monotonic() + 120
    while "TargetVerifier" not in getattr(serve.status().applications.get("eagle2"), "deployments", {}):
        assert time.monotonic() < deadline, "nothing was deployed in 120 s"
        await asyncio.sleep(0.1)
    fleet = ServeFleet(serve.get_deployment_handle("TargetVerifier", "eagle2"), drain_s=20.0)
    await _until(fleet, 2)
    return fleet


async def _until(fleet: ServeFleet, count: int, without: tuple[Replica, ...] = ()) -> tuple[Replica, ...]:
    deadline = time.monotonic() + 120
    while len(fleet.replicas()) != count or set(fleet.replicas()) & set(without):
        assert time.monotonic() < deadline, f"not {count} replicas in 120 s: {fleet.replicas()}"
        await asyncio.sleep(0.05)
    return fleet.replicas()


async def _stat(replica: Replica, name: str) -> float:
    from ray import serve

    handle = serve.get_deployment_handle("TargetVerifier", "eagle2").options(session_id=pin(replica))
    return cast("dict[str, float]", await handle.stats.remote()).get(name, 0.0)


def _pid(replica: Replica) -> int:
    from ray.serve.context import _get_global_client

    details: Any = _get_global_client().get_serve_details()
    replicas = details["applications"]["eagle2"]["deployments"]["TargetVerifier"]["replicas"]
    return next(int(one["pid"]) for one in replicas if one["replica_id"] == replica.uid)


async def _first_tokens(stream: AsyncIterator[Commit]) -> Commit:
    async with asyncio.timeout(30):
        while not (commit := await anext(stream)).token_ids:
            pass
    return commit


async def test_calls_reach_the_replica_that_they_name(fleet: ServeFleet) -> None:
    first, second = fleet.replicas()
    assert first.incarnation != second.incarnation
    assert first.max_sequences == second.max_sequences == 3
    before = await _stat(first, "prompt_tokens_total"), await _stat(second, "prompt_tokens_total")
    answers = []
    for _ in range(3):
        commits = [commit async for commit in fleet.generate(first, _SHORT)]
        assert commits[-1].finish_reason == "length"
        answers.append([token for commit in commits for token in commit.token_ids])
    assert answers[0] == answers[1] == answers[2]
    assert await _stat(first, "prompt_tokens_total") == before[0] + 3 * len(_SHORT.prompt_ids)
    assert await _stat(second, "prompt_tokens_total") == before[1]
    unknown = replace(first, uid="nobody")
    with pytest.raises(DrainingError):
        await anext(fleet.generate(unknown, _SHORT))


async def test_a_killed_verifier_ends_its_calls_and_leaves_the_directory(fleet: ServeFleet) -> None:
    victim, other = fleet.replicas()
    streams = [fleet.generate(victim, replace(_LONG, request_id=str(number))) for number in range(2)]
    for stream in streams:
        await _first_tokens(stream)
    queued = [fleet.generate(victim, replace(_LONG, request_id=f"q{number}")) for number in range(4)]
    for stream in queued:
        await anext(stream)  # taken, but decoded only where there is a place
    os.kill(_pid(victim), signal.SIGKILL)
    for stream in (*streams, *queued):
        with pytest.raises(UnavailableError) as caught:
            async with asyncio.timeout(20):
                async for _ in stream:
                    pass
        assert not isinstance(caught.value, DrainingError)
    assert fleet.replicas() == (other,)
    with pytest.raises(UnavailableError):
        await anext(fleet.generate(victim, _SHORT))
    assert [commit async for commit in fleet.generate(other, _SHORT)][-1].finish_reason == "length"
    successor = set(await _until(fleet, 2, without=(victim,))) - {other}
    assert [commit async for commit in fleet.generate(successor.pop(), _SHORT)][-1].finish_reason == "length"


async def test_an_answer_goes_on_from_another_verifier(fleet: ServeFleet, config: dict[str, Any]) -> None:
    expected = await asyncio.to_thread(_answer, config)
    answer = asyncio.create_task(asyncio.to_thread(_answer, config))
    async with asyncio.timeout(30):
        while not (busy := [one for one in fleet.replicas() if await _stat(one, "num_requests_running")]):
            await asyncio.sleep(0.02)
    os.kill(_pid(busy[0]), signal.SIGKILL)
    assert await asyncio.wait_for(answer, 120) == expected
    assert busy[0] not in fleet.replicas(), "it was killed in the middle"
    await _until(fleet, 2, without=(busy[0],))


async def test_answers_of_a_stopped_verifier_go_on_elsewhere_and_what_it_says_later_is_dropped(
    fleet: ServeFleet, config: dict[str, Any]
) -> None:
    seeds = range(4)

    def ask(seed: int) -> asyncio.Task[tuple[str, object]]:
        return asyncio.create_task(asyncio.to_thread(_answer, config, seed, 300))

    async def running() -> list[tuple[int, Replica]]:
        return [(int(await _stat(one, "num_requests_running")), one) for one in fleet.replicas()]

    expected = await asyncio.wait_for(asyncio.gather(*map(ask, seeds)), 120)
    hangs = await asyncio.to_thread(_hangs, config)
    answers = [ask(seed) for seed in seeds]
    counts = await running()
    async with asyncio.timeout(60):
        while sum(count for count, _ in counts) < len(seeds):
            await asyncio.sleep(0.02)
            counts = await running()
    count, victim = min((one for one in counts if one[0]), key=lambda one: one[0])
    assert count < len(seeds), "both have some"
    pid = _pid(victim)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert await asyncio.wait_for(asyncio.gather(*answers), 120) == expected
        assert await asyncio.to_thread(_hangs, config) == hangs + count, "the others have stayed where they were"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(60):
        while any(count for count, _ in await running()):
            await asyncio.sleep(0.1)
    await _until(fleet, 2)
    assert await asyncio.wait_for(asyncio.gather(*map(ask, seeds)), 120) == expected


def _hangs(config: dict[str, Any]) -> float:
    """Attempts that the router has given up because nothing came."""
    with urllib.request.urlopen(f"http://127.0.0.1:{config['http_options']['port']}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    name = 'eagle2_router_failovers_total{reason="hang"}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def _answer(config: dict[str, Any], seed: int = 7, max_tokens: int = 1000) -> tuple[str, object]:
    """Text and usage of a long sampled answer over HTTP, the usage without what a restart changes."""
    body = {"prompt": "the rest in there", "max_tokens": max_tokens, "seed": seed, "stream": True, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    address = f"http://127.0.0.1:{config['http_options']['port']}/v1/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        data = [line.strip().removeprefix(b"data: ") for line in response]
    assert data[-2] == b"[DONE]", data[-4:]
    events = [json.loads(one) for one in data if one and one != b"[DONE]"]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    usage = events[-1]["usage"]
    return text, (usage["prompt_tokens"], usage["completion_tokens"])


async def test_a_verifier_that_is_taken_away_keeps_its_streams_but_not_for_ever(
    fleet: ServeFleet, cluster: LocalCluster, config: dict[str, Any]
) -> None:
    from ray import serve

    both = fleet.replicas()
    impatient = ServeFleet(serve.get_deployment_handle("TargetVerifier", "eagle2"), drain_s=0.0)
    patient = [fleet.generate(replica, replace(_LONG, request_id=f"p{replica.uid}")) for replica in both]
    moving = [impatient.generate(replica, replace(_LONG, request_id=f"m{replica.uid}")) for replica in both]
    for stream in (*patient, *moving):
        await _first_tokens(stream)
    cluster.deploy(with_counts(config, pairs=1, routers=1))
    (left,) = await _until(fleet, 1)
    gone = next(number for number, replica in enumerate(both) if replica != left)
    with pytest.raises(DrainingError):
        await anext(fleet.generate(both[gone], _SHORT))
    with pytest.raises(DrainingError):
        async with asyncio.timeout(20):
            async for _ in moving[gone]:
                pass
    for _ in range(50):
        await _first_tokens(patient[gone])
    for stream in (*patient, moving[1 - gone]):
        await cast(Any, stream).aclose()
    assert [commit async for commit in fleet.generate(left, _SHORT)][-1].finish_reason == "length"
