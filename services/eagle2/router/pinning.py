"""Which verifier a call reaches: the one that it names.

Serve pickles this module, names and values, into every process that holds a handle. So it must stay free of torch, and
what is there once per process is elsewhere (``eagle2.router.directory``).
"""

from __future__ import annotations

import random

from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from eagle2.errors import DrainingError
from eagle2.protocol import Replica
from eagle2.router.directory import Directory, directory_of


def pin(replica: Replica) -> str:
    """The ``session_id`` of a call that is to reach this replica."""
    return f"{replica.uid}/"


class PinnedRouter(RequestRouter):
    """Sends a call to the replica that its ``session_id`` names, or fails it at once; without one, to any replica.

    Queue lengths are not asked for: Serve lets only a few requests at a time wait for such answers, so that a replica
    that hangs would hold up the requests of all others.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._directory().publish(_replica_of(one) for one in replicas if not one.routing_stats.get("draining"))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._directory().lost(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        uid = pending_request.metadata.session_id.partition("/")[0]
        suitable = [one for one in candidate_replicas if not uid or one.replica_id.unique_id == uid]
        if not pending_request.future.done():
            self._remove_pending_request_from_indices(pending_request)
            if suitable:
                pending_request.future.set_result(random.choice(suitable))
            else:
                pending_request.future.set_exception(DrainingError("This verifier takes no requests any more."))
        # Serve looks at the future again only where it is offered something.
        return [suitable or candidate_replicas]

    def _directory(self) -> Directory:
        return directory_of(self._deployment_id.app_name, self._deployment_id.name)


def _replica_of(running: RunningReplica) -> Replica:
    uid, metadata = running.replica_id.unique_id, running.replica_metadata
    return Replica(uid, str(metadata.get("incarnation", uid)), int(metadata.get("max_sequences", 1)))
