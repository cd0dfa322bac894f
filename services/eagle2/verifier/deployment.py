"""The verifier as a Serve deployment: lifecycle, and one stream per request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from ray import serve
from ray.serve.handle import DeploymentHandle

from eagle2.config import Settings
from eagle2.protocol import Commit, GenerationRequest, ModelDescription

if TYPE_CHECKING:
    from eagle2.verifier.service import VerifierService


class TargetVerifier:
    """One replica: the target model and its engine thread, paired with a proposer of its own node."""

    _service: VerifierService

    def __init__(self, settings: Settings, proposers: DeploymentHandle[Any] | None = None) -> None:
        # Imported here: the build task and the router import this module too, and torch is not wanted there.
        from eagle2.verifier.start import start_verifier

        self._service = start_verifier(settings, proposers, asyncio.get_running_loop())

    async def describe(self) -> ModelDescription:
        return await self._service.describe()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        """Stream one generation; Serve cancels it when the caller goes away."""
        # Closed here and not by garbage collection: the decoding is to end with its reader.
        stream = cast("AsyncGenerator[Commit, None]", self._service.generate(request))
        async with aclosing(stream):
            async for commit in stream:
                yield commit

    async def stats(self) -> dict[str, float]:
        return await self._service.stats()

    def check_health(self) -> None:
        """Raises when the engine can no longer serve; Serve then replaces the replica."""
        self._service.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_service"):
            await self._service.drain()
            self._service.close()


target_verifier = serve.deployment(name="TargetVerifier")(TargetVerifier)
