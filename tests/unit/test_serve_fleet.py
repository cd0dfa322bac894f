"""Verifiers behind a Serve handle: pinned calls, errors as the router sees them, streams that move in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from eagle2.errors import DrainingError, RequestError, UnavailableError
from eagle2.protocol import Commit, GenerationRequest, Replica, SamplingParams, StopConditions
from eagle2.router.directory import Directory, directory_of
from eagle2.router.pinning import PinnedRouter
from eagle2.router.serve_fleet import ServeFleet
from fakes.clocks import ManualClock

_REQUEST = GenerationRequest("r", "t", (1,), SamplingParams(seed=1), StopConditions(max_tokens=3))
_A, _B = Replica("a", "a.1", 8), Replica("b", "b.1", 8)


class _Response:
    """Gives commits, then an error or the end; ``before`` runs ahead of every item."""

    def __init__(
        self, commits: int, error: BaseException | None = None, *, hangs: bool = False, before: Callable[[], None]
    ) -> None:
        self.left, self.error, self.hangs, self.before = commits, error, hangs, before
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Commit]:
        return self

    async def __anext__(self) -> Commit:
        self.before()
        if self.left:
            self.left -= 1
            return Commit((self.left,), "x")
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled = True


class _Handle:
    """Answers every call with ``response`` and keeps the options of each."""

    def __init__(self, response: object) -> None:
        self.response = response
        self.pins: list[str] = []
        self.app_name, self.deployment_name = "app", "verifiers"
        self.generate = self

    def options(self, **options: Any) -> _Handle:
        if "session_id" in options:
            self.pins.append(options["session_id"])
        return self

    def remote(self, *_: object) -> object:
        return self.response


class _Kit:
    def __init__(
        self,
        commits: int = 0,
        error: BaseException | None = None,
        *,
        hangs: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = Directory()
        self.directory.publish([_A, _B])
        self.clock = ManualClock()
        self.response = _Response(commits, error, hangs=hangs, before=before)
        self.handle = _Handle(self.response)
        self.fleet = ServeFleet(
            cast("DeploymentHandle[Any]", self.handle),
            drain_s=20.0,
            directory=self.directory,
            clock=self.clock,
            poll_s=0.01,
            grace_s=0.0,
        )

    async def all(self) -> list[Commit]:
        return [commit async for commit in self.fleet.generate(_A, _REQUEST)]


def _raised_by_the_verifier(cause: Exception) -> BaseException:
    raised: BaseException = RayTaskError("generate", "traceback", cause).as_instanceof_cause()
    return raised


async def test_a_call_names_its_replica() -> None:
    kit = _Kit(2)
    assert len(await kit.all()) == 2
    assert kit.handle.pins == ["a/"]


async def test_a_refusal_of_the_verifier_comes_out_as_it_was() -> None:
    refusal = RequestError("Too long.", param="messages", code="context_length_exceeded", status=413)
    with pytest.raises(RequestError) as caught:
        await _Kit(0, _raised_by_the_verifier(refusal)).all()
    assert type(caught.value) is RequestError
    assert (caught.value.param, caught.value.code, caught.value.status) == ("messages", refusal.code, 413)


async def test_a_verifier_that_drains_says_so() -> None:
    with pytest.raises(DrainingError):
        await _Kit(0, _raised_by_the_verifier(DrainingError("Shutting down."))).all()


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("gone", None)])
async def test_a_verifier_that_dies_mid_stream_is_unavailable(error: Exception) -> None:
    kit, commits = _Kit(2, error), []
    with pytest.raises(UnavailableError) as caught:
        async for commit in kit.fleet.generate(_A, _REQUEST):
            commits.append(commit)
    assert type(caught.value) is UnavailableError
    assert len(commits) == 2
    # A process that is only out of reach may come back.
    assert kit.directory.lists(_A) == isinstance(error, ActorUnavailableError)


async def test_a_bug_of_the_verifier_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        await _Kit(0, _raised_by_the_verifier(ZeroDivisionError())).all()


async def test_closing_the_stream_cancels_the_generation() -> None:
    kit = _Kit(3)
    stream = cast(Any, kit.fleet.generate(_A, _REQUEST))
    await anext(stream)
    await stream.aclose()
    assert kit.response.cancelled


async def test_a_replica_that_is_not_listed_is_not_called() -> None:
    kit = _Kit(3)
    kit.directory.publish([_B, Replica("a", "a.2", 8)])
    with pytest.raises(DrainingError):
        await kit.all()
    assert not kit.handle.pins


async def test_a_call_that_no_replica_took_ends_when_its_replica_is_gone() -> None:
    kit = _Kit(hangs=True)
    task = asyncio.create_task(kit.all())
    await asyncio.sleep(0.03)
    assert not task.done()
    kit.directory.publish([])
    await asyncio.sleep(0.03)
    kit.clock.now += 1.0
    with pytest.raises(DrainingError):
        await asyncio.wait_for(task, 10)
    assert kit.response.cancelled


async def test_a_stream_ends_on_a_replica_that_leaves_but_not_for_ever() -> None:
    kit = _Kit(100)
    seen = 0
    with pytest.raises(DrainingError):
        async for _ in kit.fleet.generate(_A, _REQUEST):
            seen += 1
            if seen == 2:
                kit.directory.publish([_B])
            if seen > 2:
                kit.clock.now += 6.0
    # Noticed behind the second; the sixth is 24 seconds later.
    assert seen == 6


async def test_a_stream_that_ends_in_time_is_left_alone() -> None:
    kit = _Kit(5)
    stream = kit.fleet.generate(_A, _REQUEST)
    await anext(stream)
    kit.directory.publish([])
    assert len([commit async for commit in stream]) == 4


async def test_stats_need_a_replica() -> None:
    kit = _Kit()
    kit.directory.publish([])
    with pytest.raises(UnavailableError):
        await kit.fleet.stats()


async def test_describe_waits_for_a_replica() -> None:
    kit = _Kit()
    kit.directory.publish([])

    async def description() -> str:
        return "a model"

    kit.handle.response = description()
    task = asyncio.create_task(kit.fleet.describe())
    await asyncio.sleep(0.03)
    assert not task.done()
    kit.directory.publish([_B])
    assert await asyncio.wait_for(task, 10) == cast(Any, "a model")
    assert kit.handle.pins == ["b/"]


def test_the_lost_stay_away_until_serve_forgets_them() -> None:
    directory = Directory()
    directory.publish([_A, _B])
    directory.lost("a")
    assert directory.replicas() == (_B,)
    directory.publish([_A, _B])
    assert directory.replicas() == (_B,), "Serve has not noticed yet"
    directory.publish([_B])
    directory.publish([_A, _B])
    assert set(directory.replicas()) == {_A, _B}


# The request router, with Serve's machinery around it left out


def _pending(pin: str) -> Any:
    metadata = SimpleNamespace(session_id=pin)
    return SimpleNamespace(metadata=metadata, future=asyncio.get_running_loop().create_future())


def _running(uid: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=uid))


class _Bare(PinnedRouter):
    def __init__(self) -> None:
        self.removed: list[object] = []

    def _remove_pending_request_from_indices(self, pending_request: Any) -> None:
        self.removed.append(pending_request)


async def test_a_pinned_call_goes_where_it_says() -> None:
    router, pending = _Bare(), _pending("b/session")
    candidates = [_running(uid) for uid in "abc"]
    assert await router.choose_replicas(candidates, pending) == [[candidates[1]]]
    assert pending.future.result() is candidates[1]
    assert router.removed == [pending]


async def test_a_pinned_call_without_its_replica_ends_at_once() -> None:
    pending = _pending("x/")
    # Serve turns in circles where it is offered nothing.
    assert await _Bare().choose_replicas([_running("a")], pending) != []
    with pytest.raises(DrainingError):
        pending.future.result()


async def test_a_call_without_a_pin_goes_anywhere() -> None:
    pending = _pending("")
    candidates = [_running(uid) for uid in "ab"]
    await _Bare().choose_replicas(candidates, pending)
    assert pending.future.result() in candidates


async def test_a_call_that_was_given_up_is_left_alone() -> None:
    router, pending = _Bare(), _pending("a/")
    pending.future.cancel()
    await router.choose_replicas([_running("a")], pending)
    assert not router.removed


def test_serve_can_pickle_the_router_which_finds_the_directory_of_its_process() -> None:
    config = RequestRouterConfig(request_router_class="eagle2.router.pinning:PinnedRouter")
    copied = config.get_request_router_class()
    router = copied.__new__(copied)
    router._deployment_id = DeploymentID("verifiers", "app")
    assert router._directory() is directory_of("app", "verifiers")
