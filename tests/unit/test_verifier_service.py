"""Streams of a verifier while its engine is busy, hangs, or takes nothing new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from eagle2.engine.engine import Engine
from eagle2.errors import DrainingError, UnavailableError
from eagle2.protocol import Commit, GenerationRequest, SamplingParams, StopConditions
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.verifier.service import VerifierService
from fakes.verifier import describe

_REQUEST = GenerationRequest("r", "t", (1,), SamplingParams(seed=1), StopConditions(max_tokens=3))
_BEAT_S = 0.02
_EMPTY, _LAST = Commit((), ""), Commit((1,), "a", "stop")


class _Engine:
    """Commits what it is told, and turns when it is told."""

    def __init__(self) -> None:
        self.turns = 0
        self.stats = Recorder()
        self.stats.set(metrics.KV_SLOTS_CAPACITY, 200, side="target")
        self.failure: Exception | None = None
        self.sinks: list[Callable[[Commit], None]] = []
        self.cancelled = 0

    def start(self) -> None: ...

    def submit(self, _: GenerationRequest, sink: Callable[[Commit], None]) -> int:
        self.sinks.append(sink)
        return len(self.sinks)

    def cancel(self, _: int) -> None:
        self.cancelled += 1


def _service(heartbeat_s: float | None = _BEAT_S) -> tuple[_Engine, VerifierService]:
    engine = _Engine()
    return engine, VerifierService(cast(Engine, engine), describe(), heartbeat_s=heartbeat_s)


async def test_a_stream_says_first_that_it_was_taken() -> None:
    engine, service = _service()
    stream = cast(Any, service.generate(_REQUEST))
    assert await asyncio.wait_for(anext(stream), 10) == _EMPTY
    engine.sinks[0](_LAST)
    assert [commit async for commit in stream] == [_LAST]
    assert engine.cancelled == 1


async def test_a_busy_engine_is_heard_of_without_a_commit() -> None:
    engine, service = _service()
    stream = cast(Any, service.generate(_REQUEST))
    await anext(stream)
    for _ in range(3):
        engine.turns += 1
        assert await asyncio.wait_for(anext(stream), 10) == _EMPTY
    await stream.aclose()
    assert engine.cancelled == 1


async def test_an_engine_that_hangs_gives_no_sign_of_life_until_it_goes_on() -> None:
    engine, service = _service()
    stream = cast(Any, service.generate(_REQUEST))
    await anext(stream)
    item = asyncio.create_task(anext(stream))
    await asyncio.sleep(5 * _BEAT_S)
    assert not item.done()
    engine.turns += 1
    assert await asyncio.wait_for(item, 10) == _EMPTY
    await stream.aclose()


async def test_without_a_period_there_are_only_commits() -> None:
    engine, service = _service(None)
    stream = cast(Any, service.generate(_REQUEST))
    item = asyncio.create_task(anext(stream))
    engine.turns += 1
    await asyncio.sleep(0)
    engine.sinks[0](_LAST)
    assert await asyncio.wait_for(item, 10) == _LAST


async def test_a_drain_refuses_what_is_new_and_waits_for_what_runs() -> None:
    engine, service = _service()
    stream = cast(Any, service.generate(_REQUEST))
    await anext(stream)
    assert not service.is_draining
    drain = asyncio.create_task(service.drain())
    await asyncio.sleep(0)
    assert service.is_draining
    with pytest.raises(DrainingError):
        await anext(service.generate(_REQUEST))
    assert not drain.done()
    engine.sinks[0](_LAST)
    assert [commit.finish_reason async for commit in stream if commit != _EMPTY] == ["stop"]
    await asyncio.wait_for(drain, 10)


async def test_an_engine_that_has_failed_is_no_drain() -> None:
    engine, service = _service()
    engine.failure = RuntimeError("no memory")
    service.node_leaves("spot")
    with pytest.raises(UnavailableError) as caught:
        await anext(service.generate(_REQUEST))
    assert type(caught.value) is UnavailableError


async def test_a_node_that_stays_after_all_takes_requests_again() -> None:
    _, service = _service()
    service.node_leaves("unschedulable")
    assert service.is_draining
    with pytest.raises(DrainingError):
        await anext(service.generate(_REQUEST))
    service.node_leaves(None)
    stream = cast(Any, service.generate(_REQUEST))
    assert await asyncio.wait_for(anext(stream), 10) == _EMPTY
    await stream.aclose()
    await asyncio.wait_for(service.drain(), 10)
    service.node_leaves(None)
    assert service.is_draining, "a shutdown is not taken back"


async def test_how_full_the_kv_cache_is() -> None:
    engine, service = _service()
    assert service.kv_share() == 0.0
    engine.stats.set(metrics.KV_SLOTS_USED, 50, side="target")
    assert service.kv_share() == 0.25
