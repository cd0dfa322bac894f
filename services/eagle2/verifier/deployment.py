"""The verifier as a Serve deployment: lifecycle, and one stream per request."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from ray import serve
from ray.serve.handle import DeploymentHandle

from eagle2.autoscaling.policy import KV_SHARE
from eagle2.config import Settings
from eagle2.protocol import Commit, GenerationRequest, ModelDescription

if TYPE_CHECKING:
    from eagle2.verifier.service import VerifierService


class TargetVerifier:
    """One replica: the target model and its engine thread, paired with a proposer of its own node."""

    _service: VerifierService

    def __init__(self, settings: Settings, proposers: DeploymentHandle[Any] | None = None) -> None:
        # Imported here: the build task and the router import this module too, and torch is not wanted there.
        from eagle2.verifier.node_watch import watch_own_node
        from eagle2.verifier.start import new_incarnation, start_verifier

        incarnation = new_incarnation()
        self._metadata: dict[str, str | int] = {
            "incarnation": f"{incarnation:x}",
            "max_sequences": settings.engine.max_sequences,
        }
        self._service = start_verifier(settings, proposers, asyncio.get_running_loop(), incarnation)
        self._node_watch = watch_own_node(self._service.node_leaves, os.environ)

    def record_replica_metadata(self) -> dict[str, str | int]:
        """What routers learn without a call: which life this is, and how many sequences it decodes at once."""
        return self._metadata

    def record_routing_stats(self) -> dict[str, bool]:
        """What Serve tells routers again and again: whether to leave this replica out."""
        return {"draining": self._service.is_draining}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve asks for where the number of pairs follows the demand."""
        return {KV_SHARE: self._service.kv_share()}

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
        """Raises when the engine can no longer serve; Serve then replaces the replica.

        Not while it drains because its node is to go: what Serve starts instead might land on the same node.
        """
        self._service.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_service"):
            if self._node_watch is not None:
                self._node_watch.stop()
            await self._service.drain()
            self._service.close()


target_verifier = serve.deployment(
    name="TargetVerifier",
    request_router_config={
        "request_router_class": "eagle2.router.pinning:PinnedRouter",
        "request_routing_stats_period_s": 1.0,
    },
)(TargetVerifier)
