"""Autoscaling: sizes as properties, then whole days in a simulated fleet under Serve's own delays."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve import autoscaling_policy
from ray.serve._private.common import DeploymentID
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from eagle2.autoscaling.policy import (
    IN_FLIGHT,
    KV_SHARE,
    QUEUED_SECONDS,
    Demand,
    PairPolicy,
    Pairs,
    Sizing,
    pairs_wanted,
    started_for,
)

SIZING = Sizing(sequences=4)

demands = st.builds(Demand, st.floats(0, 200), st.floats(0, 1e4), st.floats(-50, 50), st.floats(0, 1))


@st.composite
def fleets(draw):
    minimum = draw(st.integers(1, 5))
    maximum = minimum + draw(st.integers(0, 20))
    return Pairs(draw(st.integers(0, maximum)), draw(st.integers(minimum, maximum)), minimum, maximum)


@given(demands, fleets(), st.floats(0, 1e4))
def test_what_is_wanted_keeps_to_the_bounds_and_stays_when_it_is_there(demand, pairs, started_s) -> None:
    wanted = pairs_wanted(demand, pairs, SIZING, started_s=started_s)
    assert pairs.minimum <= wanted <= pairs.maximum
    assert pairs_wanted(demand, replace(pairs, target=wanted), SIZING, started_s=started_s) == wanted


@given(demands, demands, fleets())
def test_more_to_do_never_wants_fewer(one, other, pairs) -> None:
    larger = Demand(
        max(one.in_flight, other.in_flight),
        max(one.queued_seconds, other.queued_seconds),
        max(one.queue_growth, other.queue_growth),
        max(one.kv_share, other.kv_share),
    )
    assert pairs_wanted(larger, pairs, SIZING) >= pairs_wanted(one, pairs, SIZING)


@given(fleets())
def test_nothing_to_do_wants_the_least(pairs) -> None:
    assert pairs_wanted(Demand(0), pairs, SIZING) == pairs.minimum


@given(st.floats(0, 100), st.floats(0, 0.99), fleets())
def test_a_demand_that_wavers_by_less_than_the_slack_moves_nothing_to_and_fro(low, wobble, pairs) -> None:
    high = low * (1 + SIZING.slack * wobble)
    targets = [pairs.target]
    for in_flight in (high, low, high, low):
        targets.append(pairs_wanted(Demand(in_flight), replace(pairs, target=targets[-1]), SIZING))
    assert targets[2] == targets[3] == targets[4]


@pytest.mark.parametrize(
    ("demand", "wanted"),
    [
        (Demand(4), 1),
        (Demand(4.1), 2),
        (Demand(4, queued_seconds=120), 2),
        (Demand(4, queued_seconds=1200), 10),
        (Demand(12, queued_seconds=120, queue_growth=-6), 3),
        (Demand(12, queued_seconds=120, queue_growth=6), 4),
        (Demand(1, kv_share=0.84), 3),
        (Demand(1, kv_share=0.9), 4),
    ],
)
def test_sizes(demand: Demand, wanted: int) -> None:
    assert pairs_wanted(demand, Pairs(running=3, target=1, minimum=1, maximum=10), SIZING) == wanted


def test_a_queue_that_grew_while_pairs_started_may_take_as_much_longer() -> None:
    pairs = Pairs(running=1, target=2, minimum=1, maximum=10)
    demand = Demand(4, queued_seconds=240)
    assert pairs_wanted(demand, pairs, SIZING) == 3
    started_s = started_for(20, 10, demand, pairs, SIZING)
    assert started_s == 30
    assert pairs_wanted(demand, pairs, SIZING, started_s=started_s) == 2
    there = replace(pairs, running=2)
    assert started_for(started_s, 10, demand, there, SIZING) == 30
    assert started_for(started_s, 10, Demand(4, queued_seconds=29), there, SIZING) == 0


@pytest.mark.parametrize("change", [{"drain_s": 0}, {"slack": -0.1}, {"kv_bound": 0}, {"kv_bound": 1.1}])
def test_senseless_sizes_are_refused(change) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        PairPolicy(**change)


# With Serve


@cache
def settings_of(config: tuple[tuple[str, float], ...]) -> AutoscalingConfig:
    return AutoscalingConfig(**{"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 2} | dict(config))


def context(
    name: str, *, target: int, running: int, metrics=None, raw=None, state=None, now=0.0, **config
) -> AutoscalingContext:
    settings = settings_of(tuple(config.items()))
    return AutoscalingContext(
        deployment_id=DeploymentID(name, "eagle2"),
        deployment_name=name,
        app_name="eagle2",
        current_num_replicas=running,
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics=metrics or {},
        raw_metrics=raw or {},
        capacity_adjusted_min_replicas=settings.min_replicas,
        capacity_adjusted_max_replicas=settings.max_replicas,
        policy_state=state or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=settings,
    )


def by_id(*contexts: AutoscalingContext) -> dict[DeploymentID, AutoscalingContext]:
    return {context.deployment_id: context for context in contexts}


def decided(decisions: dict[DeploymentID, int]) -> dict[str, int]:
    return {key.name: number for key, number in decisions.items()}


@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.floats(0, 20), st.floats(0, 1000))
def test_proposers_follow_verifiers_and_are_never_fewer_than_those(
    target, running, proposers, in_flight, queued
) -> None:
    reported = {IN_FLIGHT: {"r1": in_flight / 2, "r2": in_flight / 2}, QUEUED_SECONDS: {"r1": queued, "r2": 0.0}}
    decisions, state = PairPolicy()(
        by_id(
            context("Router", target=2, running=2, metrics=reported),
            context("TargetVerifier", target=target, running=running),
            context("DraftProposer", target=proposers, running=proposers),
        )
    )
    wanted = decided(decisions)
    assert set(wanted) == {"TargetVerifier", "DraftProposer"}  # routers stay as they are
    pairs = Pairs(running, target, 1, 3)
    assert wanted["TargetVerifier"] == pairs_wanted(Demand(in_flight, queued), pairs, Sizing(2))
    assert wanted["DraftProposer"] == max(wanted["TargetVerifier"], running, target)
    assert [key.name for key in state] == ["TargetVerifier"]


def test_bounds_are_those_of_both_and_memory_counts() -> None:
    decisions, _ = PairPolicy()(
        by_id(
            context("TargetVerifier", target=4, running=4, metrics={KV_SHARE: {"a": 1.0, "b": 0.9}}, max_replicas=9),
            context("DraftProposer", target=4, running=4, min_replicas=2, max_replicas=8),
        )
    )
    assert decided(decisions) == {"TargetVerifier": 5, "DraftProposer": 5}


def test_without_reports_the_count_of_serve_itself_is_taken() -> None:
    verifiers = context("TargetVerifier", target=1, running=1)
    verifiers._total_num_requests_value = 3.0
    decisions, _ = PairPolicy()(by_id(verifiers))
    assert decided(decisions) == {"TargetVerifier": 2}
    assert PairPolicy()(by_id(context("Router", target=1, running=1))) == ({}, {})


def test_serve_finds_the_policy_by_its_name() -> None:
    policy = AutoscalingPolicy(policy_function="eagle2.autoscaling.policy:PairPolicy", policy_kwargs={"drain_s": 12.0})
    assert policy.get_policy() is PairPolicy
    assert policy.get_policy()(**policy.policy_kwargs)._sizing.drain_s == 12


@dataclass
class Cluster:
    """Pairs that take time to start, a queue before them, and Serve's controller around the policy, in steps of 1 s."""

    start_s: float = 20.0
    slots: int = 4
    config: dict[str, float] = field(default_factory=lambda: {"upscale_delay_s": 5, "downscale_delay_s": 60})
    now: float = 0.0
    ready: int = 1
    target: int = 1
    proposers: int = 1
    starting: list[float] = field(default_factory=list)
    queue: deque[float] = field(default_factory=deque)
    ends: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decide = autoscaling_policy._apply_app_level_autoscaling_config(PairPolicy())
        self.state: dict[DeploymentID, dict] = {}
        self.reported: deque[tuple[float, float, float]] = deque(maxlen=30)  # Serve's look-back period

    def step(self, arrivals: list[float]) -> None:
        """One second in which requests of so many seconds each arrive."""
        self.now += 1
        self.queue.extend(arrivals)
        self.ready += sum(at <= self.now for at in self.starting)
        self.starting = [at for at in self.starting if at > self.now]
        while self.ends and self.ends[0] <= self.now:
            heapq.heappop(self.ends)
        while self.queue and len(self.ends) < self.ready * self.slots:
            heapq.heappush(self.ends, self.now + self.queue.popleft())
        self.reported.append((self.now, float(len(self.ends)), sum(self.queue)))
        self._scale()

    def _scale(self) -> None:
        _, in_flight, queued = (sum(values) / len(self.reported) for values in zip(*self.reported, strict=True))
        raw = {QUEUED_SECONDS: {"r": [SimpleNamespace(timestamp=at, value=value) for at, _, value in self.reported]}}
        reported = {IN_FLIGHT: {"r": in_flight}, QUEUED_SECONDS: {"r": queued}}
        known = {key.name: state for key, state in self.state.items()}
        verifiers, proposers = "TargetVerifier", "DraftProposer"
        contexts = by_id(
            context("Router", target=1, running=1, metrics=reported, raw=raw),
            context(
                verifiers,
                target=self.target,
                running=self.ready,
                state=known.get(verifiers),
                now=self.now,
                **self.config,
            ),
            context(
                proposers,
                target=self.proposers,
                running=self.proposers,
                state=known.get(proposers),
                now=self.now,
                **self.config | {"downscale_delay_s": 5},
            ),
        )
        decisions, self.state = self.decide(contexts)
        wanted = decided(decisions)
        self.proposers = wanted[proposers]
        missing = wanted[verifiers] - self.ready - len(self.starting)
        self.starting += [self.now + self.start_s] * max(0, missing)
        for _ in range(-min(0, missing)):
            if self.starting:  # those that start go first
                self.starting.pop()
            else:
                self.ready -= 1
        self.target = wanted[verifiers]
        self.targets.append(self.target)
        assert self.proposers >= max(self.ready, self.target)

    def changes(self, since: int = 0) -> int:
        seen = self.targets[since:]
        return sum(a != b for a, b in pairwise(seen))


@pytest.fixture
def cluster(monkeypatch) -> Cluster:
    made = Cluster()
    clock = SimpleNamespace(time=lambda: made.now)
    monkeypatch.setattr(autoscaling_policy, "time", clock)
    return made


def poisson(rng: random.Random, rate: float, seconds: float) -> list[float]:
    count, threshold, product = 0, math.exp(-rate), rng.random()
    while product > threshold:
        product *= rng.random()
        count += 1
    return [rng.expovariate(1 / seconds) for _ in range(count)]


def test_two_hundred_who_leave_at_once_change_nothing(cluster: Cluster) -> None:
    for _ in range(30):
        cluster.step([])
    cluster.step([5.0] * 200)
    cluster.queue.clear()
    for _ in range(400):
        cluster.step([])
    # What was seen for a second is a thirtieth in the mean; at most one change up and one down comes of it.
    assert cluster.target == cluster.ready == cluster.proposers == 1
    assert cluster.changes() <= 2


def test_two_hundred_who_stay_are_served_and_the_fleet_goes_back_without_a_bounce(cluster: Cluster) -> None:
    cluster.step([5.0] * 200)
    for _ in range(600):
        cluster.step([])
    assert max(cluster.targets) == 3
    assert not cluster.queue
    assert cluster.target == cluster.ready == cluster.proposers == 1
    peak = cluster.targets.index(3)
    assert cluster.targets[:peak] == sorted(cluster.targets[:peak])
    assert cluster.targets[peak:] == sorted(cluster.targets[peak:], reverse=True)


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_load_is_left_alone_once_it_has_settled(cluster: Cluster, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(600):
        cluster.step(poisson(rng, 5, 0.6))
    assert cluster.changes(since=120) <= 1
    assert len(cluster.queue) < 20


def test_a_load_that_goes_while_a_pair_starts_leaves_no_pair_behind(cluster: Cluster) -> None:
    while cluster.target == 1:
        cluster.step([2.0] * 3)
    assert cluster.starting
    for _ in range(5):
        cluster.step([2.0] * 3)
    for _ in range(300):
        cluster.step([])
    assert cluster.target == cluster.ready == 1
    assert not cluster.starting
    peak = max(cluster.targets)
    at = cluster.targets.index(peak)
    assert cluster.targets[at:] == sorted(cluster.targets[at:], reverse=True)


def test_a_long_stream_keeps_no_more_than_the_least(cluster: Cluster) -> None:
    cluster.step([60.0] + [10.0] * 20)
    for _ in range(300):
        cluster.step([])
    assert cluster.target == 1


@pytest.mark.parametrize("start_s", [10, 60, 180])
def test_a_slow_start_does_not_order_pairs_for_its_own_queue(cluster: Cluster, start_s: int) -> None:
    """Work for a little under three pairs; with ten allowed, those that start are enough, if a queue may drain."""
    cluster.start_s = start_s
    cluster.config |= {"max_replicas": 10, "target_ongoing_requests": 4}
    for _ in range(900):
        cluster.step([2.0] * 5)  # ten places, four of a pair
    assert max(cluster.targets) <= 4
    assert not cluster.queue
    assert cluster.changes(since=600) == 0
