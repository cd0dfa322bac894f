"""Errors that a Serve handle raises, as the router sees them; a stream that is left is cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.handle import DeploymentHandle

from eagle2.errors import RequestError, UnavailableError
from eagle2.protocol import Commit, GenerationRequest, SamplingParams, StopConditions
from eagle2.router.serve_verifier import ServeVerifier

_REQUEST = GenerationRequest("r", "t", (1,), SamplingParams(seed=1), StopConditions(max_tokens=3))


class _Response:
    def __init__(self, commits: int, error: BaseException | None) -> None:
        self.left = commits
        self.error = error
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Commit]:
        return self

    async def __anext__(self) -> Commit:
        if self.left:
            self.left -= 1
            return Commit((self.left,), "x")
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled = True


def _verifier(response: _Response) -> ServeVerifier:
    handle = SimpleNamespace(generate=SimpleNamespace(remote=lambda _: response))
    handle.options = lambda stream: handle
    return ServeVerifier(cast("DeploymentHandle[Any]", handle))


def _raised_by_the_verifier(cause: Exception) -> BaseException:
    error = RayTaskError("generate", "traceback", cause)
    raised: BaseException = error.as_instanceof_cause()
    return raised


async def test_a_refusal_of_the_verifier_comes_out_as_it_was() -> None:
    refusal = RequestError("Too long.", param="messages", code="context_length_exceeded", status=413)
    response = _Response(0, _raised_by_the_verifier(refusal))
    with pytest.raises(RequestError) as caught:
        [commit async for commit in _verifier(response).generate(_REQUEST)]
    assert type(caught.value) is RequestError
    assert (caught.value.param, caught.value.code, caught.value.status) == ("messages", refusal.code, 413)


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("gone", None)])
async def test_a_verifier_that_dies_mid_stream_is_unavailable(error: Exception) -> None:
    commits = []
    with pytest.raises(UnavailableError):
        async for commit in _verifier(_Response(2, error)).generate(_REQUEST):
            commits.append(commit)
    assert len(commits) == 2


async def test_a_bug_of_the_verifier_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        [c async for c in _verifier(_Response(0, _raised_by_the_verifier(ZeroDivisionError()))).generate(_REQUEST)]


async def test_closing_the_stream_cancels_the_generation() -> None:
    response = _Response(3, None)
    stream = _verifier(response).generate(_REQUEST)
    await anext(stream)
    assert not response.cancelled
    await cast("Any", stream).aclose()
    assert response.cancelled
