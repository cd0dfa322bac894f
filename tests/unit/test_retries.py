"""The retry budget, replicas that cool down, and quarantine: bounds that hold whatever comes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle2.errors import RequestError
from eagle2.protocol import Replica
from eagle2.router.cooldown import Cooldown
from eagle2.router.quarantine import Quarantine, fingerprint_of
from eagle2.router.retries import RetryBudget
from fakes.fleet import fleet_request

SHARES = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.5, 1.0])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(SHARES, st.integers(0, 10), st.lists(st.booleans(), max_size=300))
def test_retries_stay_within_their_share_and_a_burst(share: float, burst: int, asks: list[bool]) -> None:
    budget = RetryBudget(share, burst)
    requests = granted = 0
    for is_request in asks:
        if is_request:
            requests += 1
            budget.requested()
        elif budget.take():
            granted += 1
        assert granted <= burst + share * requests + 1e-6
        assert 0 <= budget.left <= burst


@given(SHARES, st.integers(1, 10), st.integers(0, 20))
def test_a_retry_is_refused_only_when_the_budget_is_spent(share: float, burst: int, extra: int) -> None:
    budget = RetryBudget(share, burst)
    assert [budget.take() for _ in range(burst)] == [True] * burst
    assert not budget.take()
    for _ in range(extra):
        budget.requested()
    expected = min(burst, int(share * extra + 1e-6))
    assert [budget.take() for _ in range(expected + 1)] == [True] * expected + [False]


def test_a_replica_cools_down_longer_each_time_and_a_new_life_is_not_blamed() -> None:
    clock = Clock()
    cooldown = Cooldown(clock=clock, first_s=5, longest_s=15)
    replica, reborn = Replica("r", "1", 8), Replica("r", "2", 8)
    for lasts in (5, 10, 15, 15):
        cooldown.failed(replica)
        for _ in range(8):  # the rest of the batch notices the same death
            cooldown.failed(replica)
        clock.now += lasts - 0.5
        assert cooldown.keeps_away(replica)
        assert not cooldown.keeps_away(reborn)
        clock.now += 0.5
        assert not cooldown.keeps_away(replica)
    cooldown.worked(replica)
    cooldown.failed(replica)
    clock.now += 5
    assert not cooldown.keeps_away(replica)


def test_what_was_quarantined_is_refused_for_its_time_and_nothing_else_is() -> None:
    clock = Clock()
    quarantine = Quarantine(600, clock=clock)
    bad = fleet_request("a", (1, 2, 3), seed=7)
    quarantine.check(bad)
    refused = quarantine.put(bad)
    assert (refused.status, refused.code) == (400, "request_quarantined")
    assert "600 seconds" in refused.message
    again = replace(bad, request_id="b", sampling=replace(bad.sampling, seed=8), deadline=5.0, output_ids=(1,))
    clock.now = 599.0
    with pytest.raises(RequestError, match="1 seconds") as info:
        quarantine.check(again)
    assert info.value.code == "request_quarantined"
    for other in (
        replace(bad, tenant="u"),
        replace(bad, prompt_ids=(1, 2, 3, 4)),
        replace(bad, sampling=replace(bad.sampling, temperature=0.5)),
        replace(bad, stop=replace(bad.stop, max_tokens=3)),
    ):
        assert fingerprint_of(other) != fingerprint_of(bad)
        quarantine.check(other)
    clock.now = 600.0
    quarantine.check(again)
