"""How a verifier finds its proposer: Serve names those of the node, the socket says which of them is free."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from typing import Any

from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from eagle2.errors import LinkDownError, ModelError
from eagle2.transport.base import ProposerLink
from eagle2.transport.node import NodeLink, ProposerBusyError

logger = logging.getLogger(__name__)


class NodePairing:
    """``connect`` leases a proposer on this node. Called from the pairing thread, never from the event loop.

    ``proposers`` routes with ``NodeStrictRouter``; ``loop`` is the replica's event loop; ``incarnation`` and
    ``fingerprint`` are the verifier's, as ``NodeLink.connect`` takes them; one search lasts at most ``wait_s``.
    """

    def __init__(
        self,
        proposers: DeploymentHandle[Any],
        loop: asyncio.AbstractEventLoop,
        *,
        incarnation: int,
        fingerprint: str,
        wait_s: float,
    ) -> None:
        self._proposers = proposers
        self._loop = loop
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._wait_s = wait_s

    def connect(self) -> ProposerLink | None:
        """A link to a free proposer of this node, None when there was none within ``wait_s`` seconds."""
        tried: frozenset[str] = frozenset()
        deadline = time.monotonic() + self._wait_s
        while (left := deadline - time.monotonic()) > 0:
            candidate = self._next_candidate(tried, left)
            if candidate is None:
                return None
            replica_id, metadata = candidate
            try:
                return NodeLink.connect(
                    metadata["socket"],
                    verifier_incarnation=self._incarnation,
                    fingerprint=self._fingerprint,
                    timeout_s=max(0.05, deadline - time.monotonic()),
                )
            except (LinkDownError, ProposerBusyError, ModelError) as error:
                # Leased, dying, or of a rollout's other model: another one may be free.
                logger.info("Proposer %s is not to be had: %s", replica_id, error)
                tried |= {replica_id}
        return None

    def _next_candidate(self, tried: frozenset[str], timeout_s: float) -> tuple[str, dict[str, Any]] | None:
        future = asyncio.run_coroutine_threadsafe(self._choose(tried), self._loop)
        try:
            return future.result(timeout_s)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError, RayServeException):
            future.cancel()
            return None

    async def _choose(self, tried: frozenset[str]) -> tuple[str, dict[str, Any]]:
        # A pure routing decision: no call reaches the proposer, so a busy or hung one cannot hold it up.
        async with self._proposers.choose_replica(tried, _reserve=False) as selection:
            return selection.replica_id, dict(selection.replica_metadata)
