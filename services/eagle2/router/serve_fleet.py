"""The verifiers behind a Serve handle, each one by its name."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from eagle2.errors import DrainingError, Eagle2Error, UnavailableError
from eagle2.protocol import Commit, GenerationRequest, ModelDescription, Replica
from eagle2.router.directory import Directory, directory_of
from eagle2.router.pinning import pin

_GONE = (ActorDiedError, ActorUnavailableError, DeploymentUnavailableError, ReplicaUnavailableError)


class ServeFleet:
    """Implements ``eagle2.protocol.Fleet``: one call per request, one streamed item per commit.

    The deployment must route with ``eagle2.router.pinning:PinnedRouter``. A replica that Serve takes away (a rollout, a
    smaller deployment) or that drains finishes its streams; those that have not ended ``drain_s`` seconds later raise
    ``DrainingError``, for the grace period of the replica ends at some time. ``clock`` is monotonic.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        *,
        drain_s: float,
        directory: Directory | None = None,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = 0.1,
        grace_s: float = 0.5,
    ) -> None:
        """``grace_s``: how long a call that its replica has not taken yet may still say why, once that is gone."""
        # Not lazily: only a handle that is set up hears of replicas.
        self._handle = handle.options(stream=True)
        self._directory = directory or directory_of(handle.app_name, handle.deployment_name)
        self._drain_s, self._poll_s, self._grace_s = drain_s, poll_s, grace_s
        self._clock = clock

    def replicas(self) -> tuple[Replica, ...]:
        return self._directory.replicas()

    async def generate(self, replica: Replica, request: GenerationRequest) -> AsyncIterator[Commit]:
        """Closing this iterator, or cancelling its reader, cancels the generation on the replica."""
        if not self._directory.lists(replica):
            raise DrainingError("This verifier takes no requests any more.")
        pinned = self._handle.options(session_id=pin(replica))
        response = cast("DeploymentResponseGenerator[Commit]", pinned.generate.remote(request))
        left = _Leaving(self._directory, replica, self._clock)
        try:
            with _translated(self._directory, replica):
                commit = await self._first(response, left)
                while commit is not None:
                    yield commit
                    if left.for_s() > self._drain_s:
                        raise DrainingError("This verifier is shutting down.")
                    commit = await _next(response)
        finally:
            response.cancel()

    async def describe(self) -> ModelDescription:
        """Waits for a replica. Raises ``UnavailableError`` when it goes away meanwhile."""
        while not (replicas := self.replicas()):  # noqa: ASYNC110 - they are told to another thread
            await asyncio.sleep(self._poll_s)
        return cast(ModelDescription, await self._call("describe", random.choice(replicas)))

    async def stats(self) -> dict[str, float]:
        replicas = self.replicas()
        if not replicas:
            raise UnavailableError("No verifier answers.")
        return cast("dict[str, float]", await self._call("stats", random.choice(replicas)))

    async def _call(self, method: str, replica: Replica) -> object:
        pinned = self._handle.options(stream=False, session_id=pin(replica), method_name=method)
        with _translated(self._directory, replica):
            return await cast("DeploymentResponse[object]", pinned.remote())

    async def _first(self, response: DeploymentResponseGenerator[Commit], left: _Leaving) -> Commit | None:
        """The first item. Serve itself would wait without end for a replica of which nothing is left."""
        first = asyncio.create_task(_next(response))
        try:
            while not first.done():
                await asyncio.wait({first}, timeout=self._poll_s)
                if not first.done() and left.for_s() > self._grace_s:
                    raise DrainingError("This verifier takes no requests any more.")
            return first.result()
        finally:
            first.cancel()


class _Leaving:
    """How long ago a replica was found to be no longer listed."""

    def __init__(self, directory: Directory, replica: Replica, clock: Callable[[], float]) -> None:
        self._directory, self._replica, self._clock = directory, replica, clock
        self._since: float | None = None

    def for_s(self) -> float:
        """Seconds; -1 while it is listed."""
        if self._directory.lists(self._replica):
            self._since = None
            return -1.0
        if self._since is None:
            self._since = self._clock()
        return self._clock() - self._since


async def _next(response: DeploymentResponseGenerator[Commit]) -> Commit | None:
    try:
        return await anext(response)
    except StopAsyncIteration:
        return None


@contextmanager
def _translated(directory: Directory, replica: Replica) -> Iterator[None]:
    """A lost verifier becomes ``UnavailableError``; what the verifier raised on purpose comes out as it was."""
    try:
        yield
    except _GONE as error:
        raise _gone(error, directory, replica) from error
    except RayTaskError as error:
        if isinstance(error.cause, Eagle2Error):
            raise error.cause from None
        if isinstance(error.cause, _GONE):
            raise _gone(error.cause, directory, replica) from error
        raise


def _gone(error: Exception, directory: Directory, replica: Replica) -> UnavailableError:
    if isinstance(error, ActorDiedError):
        directory.lost(replica.uid)
    return UnavailableError("The verifier of this request is gone.")
