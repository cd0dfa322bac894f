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
"""Why a replica was chosen. ``spill``: another one holds the session, and is too busy."""


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

    The order: the owner of the session; a holder of its longest prefix (``placement.holders`` goes from the shortest
    prefix to the longest); the first of the session's rendezvous order, or the least loaded for a request without a
    session. A replica is passed over as owner when it has no free place and more than ``load_bound`` times the
    mean load while another has a free place; for everything else when this request would bring it above
    ``load_bound`` times the mean.
    """
    raise NotImplementedError


def owner_of(replica: Replica) -> Owner:
    """The replica as the session store names it."""
    return Owner(replica.uid, replica.incarnation)


def rendezvous(name: str, replicas: Sequence[Replica]) -> list[Replica]:
    """``replicas`` in the order of preference of ``name``, the same in every router (highest random weight).

    A replica that leaves or comes moves only the names whose first choice it was or becomes.
    """
    return sorted(replicas, key=lambda replica: (_weight(name, replica.uid), replica.uid), reverse=True)


def _weight(name: str, uid: str) -> bytes:
    return hashlib.blake2b(f"{len(uid)}:{uid}{name}".encode(), digest_size=8).digest()
