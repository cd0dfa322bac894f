"""Loads of replicas: own ones counted, others' believed for a while, and both told to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle2.protocol.fleet import Replica
from eagle2.router.load import Capacity, InFlight, LoadReports
from eagle2.session.store import Placement, StoreError
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

FOUR = tuple(Replica(f"replica-{n}", "life", 8) for n in range(4))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Reports:
    """The part of a session store that load reports use."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Mapping[str, int], float]] = []
        self.known = Placement()
        self.up = True

    async def report(self, router: str, loads: Mapping[str, int], ttl_s: float) -> None:
        self._check()
        self.told.append((router, loads, ttl_s))

    async def lookup(self, session: str | None, prefixes) -> Placement:
        self._check()
        return self.known

    def _check(self) -> None:
        if not self.up:
            raise StoreError("The store is down.")


def test_sequences_are_counted_while_they_run_and_then_no_more() -> None:
    in_flight = InFlight(clock=Clock())
    with pytest.raises(KeyError), in_flight.at("a"), in_flight.at("b"), in_flight.at("a"):
        assert in_flight.counts() == {"a": 2, "b": 1}
        raise KeyError
    assert in_flight.counts() == {}


def test_others_take_places_but_never_the_share_of_this_router() -> None:
    in_flight = InFlight(clock=Clock())
    assert in_flight.capacity(FOUR) == Capacity(32, 32)
    in_flight.heard(Placement(loads={"replica-0": 8, "replica-1": 2, "gone": 99}, routers=1))
    assert in_flight.capacity(FOUR) == Capacity(32, 22)
    in_flight.heard(Placement(loads={replica.uid: 8 for replica in FOUR}, routers=2))
    assert in_flight.capacity(FOUR) == Capacity(32, 11)
    assert in_flight.capacity(()) == Capacity(0, 0)


def test_old_news_is_no_news() -> None:
    clock = Clock()
    in_flight = InFlight(clock=clock, trust_s=5)
    in_flight.heard(Placement(loads={"replica-0": 8}, routers=1))
    clock.now += 5
    assert in_flight.capacity(FOUR).places == 24
    clock.now += 0.1
    assert in_flight.capacity(FOUR).places == 32


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_routers_that_hear_of_each_other_always_leave_work_for_the_fleet_and_little_above_it(held) -> None:
    """What all may have together is at least the fleet, so no replica idles; and each has its share."""
    allowed = []
    for own in range(len(held)):
        in_flight = InFlight(clock=Clock())
        in_flight.heard(Placement(loads={"replica-0": sum(held) - held[own]}, routers=len(held) - 1))
        allowed.append(in_flight.capacity(FOUR).places)
    assert min(allowed) >= 32 // len(held)
    assert sum(allowed) >= 32
    assert all(own + sum(held) - held[n] >= 32 for n, own in enumerate(allowed))


async def test_reports_go_out_and_news_come_in() -> None:
    store, in_flight = Reports(), InFlight(clock=Clock())
    store.known = Placement(loads={"replica-0": 3}, routers=1)
    reports = LoadReports(store, in_flight, Recorder(), router="router-1", interval_s=2)
    with in_flight.at("replica-2"):
        await reports.report()
    assert store.told == [("router-1", {"replica-2": 1}, 6)]
    assert in_flight.capacity(FOUR).places == 29


async def test_a_store_that_is_down_is_counted_and_asked_again() -> None:
    store, in_flight, recorder = Reports(), InFlight(clock=Clock()), Recorder()
    store.up = False
    store.known = Placement(loads={"replica-0": 3}, routers=1)
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        assert in_flight.capacity(FOUR).places == (32 if len(pauses) < 4 else 29)
        store.up = len(pauses) >= 3
        await asyncio.sleep(0)

    task = asyncio.create_task(LoadReports(store, in_flight, recorder, router="r", interval_s=1, sleep=sleep).run())
    async with asyncio.timeout(20):
        while len(pauses) < 5:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(pauses) == {1}
    assert recorder.get(metrics.LOAD_REPORTS_FAILED) == 3
    assert store.told[-1] == ("r", {}, 3)
