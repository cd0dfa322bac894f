"""A verifier behind a Serve handle, as the router's HTTP side sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from eagle2.protocol import Commit, GenerationRequest, ModelDescription
from eagle2.router.serve_fleet import translated


class ServeVerifier:
    """``eagle2.protocol.Verifier`` over a handle: one call per request, one streamed item per commit.

    While there is no replica, a handle waits for one; callers bound that with time limits of their own.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def describe(self) -> ModelDescription:
        """Raises ``UnavailableError`` when the verifier goes away meanwhile."""
        with translated():
            return await cast("DeploymentResponse[ModelDescription]", self._handle.describe.remote())

    async def stats(self) -> dict[str, float]:
        """Counters of one verifier. Raises ``UnavailableError`` when it goes away meanwhile."""
        with translated():
            return await cast("DeploymentResponse[dict[str, float]]", self._handle.stats.remote())

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        """Stream one generation. Closing this iterator, or cancelling its reader, cancels it on the verifier."""
        response = cast("DeploymentResponseGenerator[Commit]", self._streaming.generate.remote(request))
        try:
            with translated():
                async for commit in response:
                    if commit.token_ids or commit.text or commit.finish_reason is not None:
                        yield commit
        finally:
            response.cancel()
