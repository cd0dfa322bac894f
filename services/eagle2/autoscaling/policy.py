"""How many pairs are wanted: the demand that routers report, and Serve's application-level autoscaling around it.

Serve applies its own delays (``upscale_delay_s``, ``downscale_delay_s``) and bounds to what is wanted here, and
averages what is reported over ``look_back_period_s``. The policy therefore is about size alone: no smoothing, and no
delays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

IN_FLIGHT = "in_flight"
QUEUED_SECONDS = "queued_seconds"
KV_SHARE = "kv_share"
"""What replicas report to Serve (``record_autoscaling_stats``): routers the first two, verifiers the last."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What there is to do. in_flight: sequences that decode. queued_seconds: how long those that wait would keep one
    place busy; queue_growth: by how much that grows in a second. kv_share: share of the running verifiers' KV slots
    that sequences hold, 0 to 1.
    """

    in_flight: float
    queued_seconds: float = 0.0
    queue_growth: float = 0.0
    kv_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Pairs:
    """How many pairs run, how many are to be there (those that start included), and between which bounds."""

    running: int
    target: int
    minimum: int
    maximum: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """How much a pair is for. sequences: what it should have in flight. drain_s: how long a queue may take to drain.
    slack: the part of the demand that must fit besides before a pair goes. kv_bound: what sequences may hold of the
    KV slots.
    """

    sequences: float
    drain_s: float = 30.0
    slack: float = 0.25
    kv_bound: float = 0.85

    def __post_init__(self) -> None:
        """Raises ValueError for values that make no sense."""
        for name, sound in (
            ("sequences", self.sequences > 0),
            ("drain_s", self.drain_s > 0),
            ("slack", self.slack >= 0),
            ("kv_bound", 0 < self.kv_bound <= 1),
        ):
            if not sound:
                raise ValueError(f"Autoscaling cannot work with {name} = {getattr(self, name)}.")


def pairs_wanted(demand: Demand, pairs: Pairs, sizing: Sizing, *, started_s: float = 0.0) -> int:
    """The number of pairs that the demand calls for; the present target where that is about right.

    ``started_s``: how long pairs have been starting while the queue grew (``started_for``). Such a queue may take
    longer to drain by that time: the pairs that start were ordered for it, and more for its growth would overshoot.
    """
    # While a queue drains, every place is taken; what it shrinks by is not needed once it is empty.
    lasting = max(0.0, demand.in_flight + min(0.0, demand.queue_growth))
    by_sequences = (lasting + demand.queued_seconds / (sizing.drain_s + started_s)) / sizing.sequences
    by_memory = pairs.running * demand.kv_share / sizing.kv_bound
    needed = max(by_sequences, by_memory)
    # Without slack, a demand at the border of two sizes would have a pair come and go for ever.
    smaller = math.ceil(needed * (1 + sizing.slack))
    wanted = max(math.ceil(needed), min(smaller, pairs.target))
    return max(pairs.minimum, min(wanted, pairs.maximum))


def started_for(before_s: float, elapsed_s: float, demand: Demand, pairs: Pairs, sizing: Sizing) -> float:
    """How long pairs have been starting beside a queue: what it was, ``elapsed_s`` later. A drained queue ends it."""
    if demand.queued_seconds < sizing.drain_s:  # less than one place's worth
        return 0.0
    return before_s + elapsed_s if pairs.target > pairs.running else before_s


class PairPolicy:
    """The application's ``autoscaling_policy`` in a Serve config: ``eagle2.autoscaling.policy:PairPolicy``.

    ``policy_kwargs`` are the fields of ``Sizing`` except ``sequences``, which is ``target_ongoing_requests`` of the
    verifiers. Verifiers and proposers get one size, and proposers never go below the verifiers that are there or
    coming. Routers keep their own: they need ``autoscaling_config`` only to be heard.
    """

    def __init__(
        self,
        *,
        router: str = "Router",
        verifier: str = "TargetVerifier",
        proposer: str = "DraftProposer",
        **sizing: float,
    ) -> None:
        """Raises ValueError for a size that makes no sense, TypeError for a name that is none."""
        self._sizing = Sizing(1.0, **sizing)
        self._router, self._verifier, self._proposer = router, verifier, proposer

    def __call__(self, contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Wanted replicas and state by deployment; deployments that are left out stay as they are."""
        by_name = {context.deployment_name: (key, context) for key, context in contexts.items()}
        if self._verifier not in by_name:
            return {}, {}
        key, verifiers = by_name[self._verifier]
        proposers = by_name.get(self._proposer)
        bounded = [verifiers] if proposers is None else [verifiers, proposers[1]]
        pairs = Pairs(
            running=verifiers.current_num_replicas,
            target=verifiers.target_num_replicas,
            minimum=max(context.capacity_adjusted_min_replicas for context in bounded),
            maximum=min(context.capacity_adjusted_max_replicas for context in bounded),
        )
        config: Any = verifiers.config
        sizing = replace(self._sizing, sequences=float(config.target_ongoing_requests))
        demand = self._demand(by_name[self._router][1] if self._router in by_name else None, verifiers)
        now = float(verifiers.current_time or 0.0)
        state = verifiers.policy_state
        started_s = started_for(state.get("started_s", 0.0), now - state.get("at", now), demand, pairs, sizing)
        wanted = pairs_wanted(demand, pairs, sizing, started_s=started_s)
        decisions = {key: wanted}
        if proposers is not None:
            decisions[proposers[0]] = max(wanted, pairs.running, pairs.target)
        return decisions, {key: {"started_s": started_s, "at": now}}

    def _demand(self, routers: AutoscalingContext | None, verifiers: AutoscalingContext) -> Demand:
        """What routers report; where they report nothing, what Serve counts itself."""
        reported = (routers.aggregated_metrics or {}) if routers is not None else {}
        shares = (verifiers.aggregated_metrics or {}).get(KV_SHARE, {})
        in_flight = sum(reported[IN_FLIGHT].values()) if IN_FLIGHT in reported else verifiers.total_num_requests
        series = ((routers.raw_metrics or {}) if routers is not None else {}).get(QUEUED_SECONDS, {})
        return Demand(
            in_flight=in_flight,
            queued_seconds=sum(reported.get(QUEUED_SECONDS, {}).values()),
            queue_growth=sum(_slope(points) for points in series.values()),
            kv_share=sum(shares.values()) / len(shares) if shares else 0.0,
        )


def _slope(points: Sequence[Any]) -> float:
    """Change per second between the ends of a series of Serve (``timestamp`` and ``value``)."""
    span = points[-1].timestamp - points[0].timestamp if points else 0.0
    return (points[-1].value - points[0].value) / span if span > 0 else 0.0
