"""Which replica a request goes to: filter, score, pick. Pure functions; equal input gives equal choices everywhere."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from eagle2.config import RoutingSettings
from eagle2.protocol.fleet import Replica
from eagle2.session.store import Owner, Placement

Reason = Literal["owner", "prefix", "load", "rendezvous", "spill", "random"]
"""Why a replica was chosen. ``rendezvous``: it is the first choice of the name. ``load``: it has fewer in flight than
the first choice. ``spill``: another one holds the session, and is too busy."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica that a request goes to, and why."""

    replica: Replica
    reason: Reason


def choose(
    replicas: Sequence[Replica],
    placement: Placement | None,
    *,
    own_loads: Mapping[str, int],
    excluded: Collection[str],
    session: str | None,
    request_id: str,
    settings: RoutingSettings,
) -> Choice | None:
    """The replica for one attempt, None when ``excluded`` (uids) leaves none.

    ``placement`` is what the session store knows, None while it cannot be asked: then all routers send a session to the
    same replica by its name alone. ``own_loads``: sequences that this router has in flight, by uid. ``session`` is
    the hashed name, None for a request without one; ``request_id`` then breaks ties.

    The order: the owner of the session; a holder of the longest prefix (``placement.holders`` goes from the shortest
    prefix to the longest); the first of the session's rendezvous order, or the least loaded for a request without a
    session. A replica is passed over as owner when it has no free place and more than ``load_bound`` times the
    mean load while another has a free place; for everything else already when this request would bring it above
    ``load_bound`` times the mean.
    """
    candidates = [replica for replica in replicas if replica.uid not in excluded]
    if not candidates:
        return None
    loads = _Loads.of(candidates, own_loads, placement, settings.load_bound)
    if settings.affinity == "random":
        return Choice(rendezvous(request_id, loads.with_free_places(candidates))[0], "random")
    if placement is None and session is not None:
        order = rendezvous(session, candidates)
        return _first_of(order, [replica for replica in order if not loads.overloaded(replica)])
    owner = placement.owner if placement is not None else None
    pinned = next((replica for replica in candidates if owner_of(replica) == owner), None)
    if pinned is not None and not loads.overloaded(pinned):
        return Choice(pinned, "owner")

    order = rendezvous(session if session is not None else request_id, candidates)
    roomy = [replica for replica in loads.with_free_places(order) if loads.has_room(replica)]
    assert roomy, "the least loaded replica always has room"
    holder = _holder(roomy, placement, loads)
    if pinned is not None:
        return Choice(holder or roomy[0], "spill")
    if holder is not None:
        return Choice(holder, "prefix")
    if session is None:
        return Choice(min(roomy, key=loads.share), "load")
    return _first_of(order, roomy)


def owner_of(replica: Replica) -> Owner:
    """The replica as the session store names it. Another incarnation is somebody else, and holds nothing."""
    return Owner(replica.uid, replica.incarnation)


def rendezvous(name: str, replicas: Sequence[Replica]) -> list[Replica]:
    """``replicas`` in the order of preference of ``name``, the same in every router (highest random weight).

    A replica that leaves or comes moves only the names whose first choice it was or becomes.
    """
    return sorted(replicas, key=lambda replica: (_weight(name, replica.uid), replica.uid), reverse=True)


def _weight(name: str, uid: str) -> bytes:
    # The length keeps ("a", "bc") apart from ("ab", "c").
    return hashlib.blake2b(f"{len(uid)}:{uid}{name}".encode(), digest_size=8).digest()


def _first_of(order: Sequence[Replica], allowed: Sequence[Replica]) -> Choice:
    return Choice(allowed[0], "rendezvous" if allowed[0] is order[0] else "load")


def _holder(roomy: Sequence[Replica], placement: Placement | None, loads: _Loads) -> Replica | None:
    """The least loaded holder of the longest prefix that one of ``roomy`` holds; of equal ones the first."""
    for holders in reversed(placement.holders if placement is not None else ()):
        warm = [replica for replica in roomy if owner_of(replica) in holders]
        if warm:
            return min(warm, key=loads.share)
    return None


@dataclass(frozen=True, slots=True)
class _Loads:
    """Sequences in flight by uid, in all routers, and what that means beside the mean of the replicas in question.

    Loads are compared as shares of what a replica decodes at once, so replicas need not be of one size.
    """

    by_uid: Mapping[str, int]
    total: int
    capacity: int
    some_free: bool
    bound: float

    @classmethod
    def of(
        cls, candidates: Sequence[Replica], own: Mapping[str, int], placement: Placement | None, bound: float
    ) -> _Loads:
        others = placement.loads if placement is not None else {}
        # A report that is nonsense must not draw requests.
        by_uid = {r.uid: max(0, own.get(r.uid, 0)) + max(0, others.get(r.uid, 0)) for r in candidates}
        return cls(
            by_uid,
            total=sum(by_uid.values()),
            capacity=sum(replica.max_sequences for replica in candidates),
            some_free=any(by_uid[replica.uid] < replica.max_sequences for replica in candidates),
            bound=bound,
        )

    def share(self, replica: Replica) -> float:
        return self.by_uid[replica.uid] / replica.max_sequences

    def with_free_places(self, candidates: Sequence[Replica]) -> list[Replica]:
        """All of them where no place is free anywhere."""
        return [replica for replica in candidates if self.share(replica) < 1] or list(candidates)

    def overloaded(self, replica: Replica) -> bool:
        """No free place, far more than the mean, and a free place elsewhere."""
        share = self.share(replica)
        return self.some_free and share >= 1 and share > self.bound * self.total / self.capacity

    def has_room(self, replica: Replica) -> bool:
        """Whether one more keeps it within the bound: consistent hashing with bounded loads."""
        fair = (self.total + 1) * replica.max_sequences / self.capacity
        return self.by_uid[replica.uid] + 1 <= math.ceil(self.bound * fair)
