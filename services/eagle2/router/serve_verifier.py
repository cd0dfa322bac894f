"""A verifier behind a Serve handle, as the router's HTTP side sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, cast

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from eagle2.errors import Eagle2Error, UnavailableError
from eagle2.protocol import Commit, GenerationRequest, ModelDescription

_GONE = (ActorDiedError, ActorUnavailableError, DeploymentUnavailableError, ReplicaUnavailableError)


class ServeVerifier:
    """``eagle2.protocol.Verifier`` over a handle: one call per request, one streamed item per commit.

    While there is no replica, a handle waits for one; callers bound that with time limits of their own.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def describe(self) -> ModelDescription:
        """Raises ``UnavailableError`` when the verifier goes away meanwhile."""
        with _translated():
            return await cast("DeploymentResponse[ModelDescription]", self._handle.describe.remote())

    async def stats(self) -> dict[str, float]:
        """Counters of one verifier. Raises ``UnavailableError`` when it goes away meanwhile."""
        with _translated():
            return await cast("DeploymentResponse[dict[str, float]]", self._handle.stats.remote())

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        """Stream one generation. Closing this iterator, or cancelling its reader, cancels it on the verifier."""
        response = cast("DeploymentResponseGenerator[Commit]", self._streaming.generate.remote(request))
        try:
            with _translated():
                async for commit in response:
                    yield commit
        finally:
            response.cancel()


@contextmanager
def _translated() -> Iterator[None]:
    """A lost verifier becomes ``UnavailableError``; what the verifier raised on purpose comes out as it was."""
    try:
        yield
    except _GONE as error:
        raise UnavailableError("The verifier of this request is gone.") from error
    except RayTaskError as error:
        if isinstance(error.cause, Eagle2Error):
            raise error.cause from None
        if isinstance(error.cause, _GONE):
            raise UnavailableError("The verifier of this request is gone.") from error
        raise
