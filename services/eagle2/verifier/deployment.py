"""The verifier as a Serve deployment: lifecycle, and one stream per request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from eagle2.config import Settings
from eagle2.protocol import Commit, GenerationRequest, ModelDescription


class TargetVerifier:
    """One replica: the target model and its engine thread, paired with a proposer of its own node."""

    def __init__(self, settings: Settings, proposers: DeploymentHandle[Any] | None = None) -> None:
        self._service = self.make_service(settings, proposers, asyncio.get_running_loop())

    def make_service(
        self, settings: Settings, proposers: DeploymentHandle[Any] | None, loop: asyncio.AbstractEventLoop
    ) -> Any:
        """The service that this replica wraps. The build task and the router never come here, and so not to torch."""
        from eagle2.verifier.start import start_verifier

        return start_verifier(settings, proposers, loop)

    async def describe(self) -> ModelDescription:
        description: ModelDescription = await self._service.describe()
        return description

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        """Stream one generation; Serve cancels it when the caller goes away."""
        async for commit in self._service.generate(request):
            yield commit

    async def stats(self) -> dict[str, float]:
        stats: dict[str, float] = await self._service.stats()
        return stats

    def check_health(self) -> None:
        """Raises when the engine can no longer serve; Serve then replaces the replica."""
        self._service.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_service"):
            await self._service.drain()
            self._service.close()


target_verifier = serve.deployment(name="TargetVerifier")(TargetVerifier)
