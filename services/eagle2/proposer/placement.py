"""Which proposer a verifier is offered: one of its own node, and none that it has tried already.

Serve loads this class by its import string into the process that holds the handle, so it must stay free of torch.
"""

from __future__ import annotations

import random

from ray.serve.request_router import FIFOMixin, LocalityMixin, PendingRequest, RequestRouter, RunningReplica


class NodeStrictRouter(LocalityMixin, FIFOMixin, RequestRouter):
    """Offers replicas of the caller's node only; the call's first argument names replica ids to leave out."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        tried: frozenset[str] = frozenset()
        if pending_request is not None:
            # Nothing suitable now may change soon (a proposer starts): ask again, with growing pauses.
            pending_request.routing_context.should_backoff = True
            if pending_request.args:
                tried = pending_request.args[0]
        on_node = self.rank_replicas_via_locality(candidate_replicas)[0]
        free = [replica for replica in on_node if replica.replica_id.unique_id not in tried]
        # Verifiers that start together should not all ask the same proposer first.
        random.shuffle(free)
        return [free] if free else []
