"""What every fleet promises to the router: the scripted one of the tests, and the one over a Serve handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.handle import DeploymentHandle

from eagle2.errors import DrainingError, UnavailableError
from eagle2.protocol import Commit, Fleet, GenerationRequest
from eagle2.router.directory import Directory
from eagle2.router.serve_fleet import ServeFleet
from fakes.fleet import FakeFleet, fleet_request, undisturbed

REQUEST = next(
    r for r in (fleet_request("x", seed=s, max_tokens=40) for s in range(99)) if len(undisturbed(r)[0]) == 40
)


class _Response:
    """A stream as Ray hands it out: errors come wrapped, a death comes as Ray's own."""

    def __init__(self, commits: AsyncIterator[Commit]) -> None:
        self._commits = commits
        self._closing: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[Commit]:
        return self

    async def __anext__(self) -> Commit:
        try:
            return await anext(self._commits)
        except DrainingError as error:
            raise RayTaskError("generate", "traceback", error).as_instanceof_cause() from None
        except UnavailableError:
            raise ActorDiedError from None

    def cancel(self) -> None:
        self._closing = asyncio.create_task(cast("Any", self._commits).aclose())


class _Handle:
    """Leads a pinned call to the newest life of that name, as Serve does."""

    app_name, deployment_name = "app", "verifiers"

    def __init__(self, fleet: FakeFleet, pin: str = "") -> None:
        self._fleet, self._pin = fleet, pin
        self.generate = self

    def options(self, *, session_id: str = "", **_: Any) -> _Handle:
        return _Handle(self._fleet, session_id or self._pin)

    def remote(self, request: GenerationRequest) -> _Response:
        life = self._fleet.at(self._pin.partition("/")[0])
        return _Response(self._fleet.generate(life.identity, request))


def _fake(scripted: FakeFleet) -> Fleet:
    return scripted


def _serve(scripted: FakeFleet) -> Fleet:
    directory = Directory()
    directory.publish(list(scripted.replicas()))
    handle = cast("DeploymentHandle[Any]", _Handle(scripted))
    return ServeFleet(handle, drain_s=20.0, directory=directory, poll_s=0.01, grace_s=0.5)


@pytest.fixture(params=[_fake, _serve], ids=["fake", "serve"])
def make(request: pytest.FixtureRequest) -> Callable[[FakeFleet], Fleet]:
    return cast("Callable[[FakeFleet], Fleet]", request.param)


async def whole(fleet: Fleet, place: int, request: GenerationRequest) -> list[Commit]:
    return [commit async for commit in fleet.generate(fleet.replicas()[place], request)]


async def test_every_replica_gives_the_same_answer_and_counts_it(make: Callable[[FakeFleet], Fleet]) -> None:
    fleet = make(FakeFleet(3))
    assert len({replica.incarnation for replica in fleet.replicas()}) == 3
    for place in range(3):
        first, *commits = await whole(fleet, place, REQUEST)
        assert first == Commit((), ""), "the request was taken"
        assert all(commit.finish_reason is None and commit.usage is None for commit in commits[:-1])
        last = commits[-1]
        ids = [token for commit in commits for token in commit.token_ids]
        assert (ids, "".join(c.text for c in commits), last.finish_reason) == undisturbed(REQUEST)
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 40)


async def test_an_answer_goes_on_where_another_one_ended(make: Callable[[FakeFleet], Fleet]) -> None:
    fleet = make(FakeFleet(2))
    ids: list[int] = []
    text = ""
    async with aclosing(cast("Any", fleet.generate(fleet.replicas()[0], REQUEST))) as stream:
        async for commit in stream:
            ids.extend(commit.token_ids)
            text += commit.text
            if len(ids) > 10:
                break
    rest = await whole(fleet, 1, replace(REQUEST, output_ids=tuple(ids), characters_released=len(text), attempt=1))
    ids += [token for commit in rest for token in commit.token_ids]
    assert (ids, text + "".join(c.text for c in rest), rest[-1].finish_reason) == undisturbed(REQUEST)
    assert rest[-1].usage is not None
    assert rest[-1].usage.completion_tokens == 40


async def test_closing_ends_the_decoding(make: Callable[[FakeFleet], Fleet]) -> None:
    scripted = FakeFleet(1, pace_s=0.01)
    fleet = make(scripted)
    async with aclosing(cast("Any", fleet.generate(fleet.replicas()[0], REQUEST))) as stream:
        await anext(stream)
        assert scripted.running == 1
    async with asyncio.timeout(10):
        while scripted.running:
            await asyncio.sleep(0)
    assert scripted.lives[0].finished == 0


@pytest.mark.parametrize("after", [0, 10])
async def test_a_death_is_told_before_and_within_a_stream(make: Callable[[FakeFleet], Fleet], after: int) -> None:
    scripted = FakeFleet(2)
    fleet = make(scripted)
    if not after:
        scripted.kill("r0")
    ids: list[int] = []
    with pytest.raises(UnavailableError) as caught:
        async for commit in fleet.generate(fleet.replicas()[0], REQUEST):
            ids.extend(commit.token_ids)
            if len(ids) >= after > 0:
                scripted.kill("r0")
    assert not isinstance(caught.value, DrainingError)
    assert ids == undisturbed(REQUEST)[0][: len(ids)]


async def test_a_drain_lets_streams_end_and_takes_no_more(make: Callable[[FakeFleet], Fleet]) -> None:
    scripted = FakeFleet(2)
    fleet = make(scripted)
    replica = fleet.replicas()[0]
    ids: list[int] = []
    async for commit in fleet.generate(replica, REQUEST):
        ids.extend(commit.token_ids)
        if len(ids) == 1:
            scripted.drain("r0", noticed=False)
    assert ids == undisturbed(REQUEST)[0]
    with pytest.raises(DrainingError):
        await whole(fleet, 0, REQUEST)
    assert scripted.lives[0].started == 1


async def test_a_hung_replica_is_silent_and_can_be_left(make: Callable[[FakeFleet], Fleet]) -> None:
    scripted = FakeFleet(1)
    fleet = make(scripted)
    stream = cast("Any", fleet.generate(fleet.replicas()[0], REQUEST))
    assert await anext(stream) == Commit((), "")
    scripted.hang("r0")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(10):
        while scripted.running:
            await asyncio.sleep(0)
