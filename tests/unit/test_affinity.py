"""Placement of requests: properties over all fleets, then the cases that operators meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle2.config import RoutingSettings
from eagle2.protocol.fleet import Replica
from eagle2.router.affinity import Choice, choose, owner_of, rendezvous
from eagle2.session.store import Owner, Placement

SETTINGS = RoutingSettings()
NOTHING_KNOWN = Placement()
FOUR = tuple(Replica(f"replica-{n}", f"life-{n}", 8) for n in range(4))


def placed(
    replicas=FOUR, placement=NOTHING_KNOWN, *, own_loads=None, excluded=(), session=None, request_id="r", **change
):
    return choose(
        replicas,
        placement,
        own_loads=own_loads or {},
        excluded=excluded,
        session=session,
        request_id=request_id,
        settings=replace(SETTINGS, **change),
    )


@st.composite
def situations(draw):
    """Everything that ``choose`` takes, with owners and holders of this life and of others."""
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=6))
    replicas = [Replica(name, draw(st.sampled_from("12")), draw(st.integers(1, 9))) for name in names]
    owners = st.builds(Owner, st.sampled_from("abcdefg"), st.sampled_from("123"))
    loads = st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 30))
    holders = st.lists(st.frozensets(owners, max_size=3), max_size=3).map(tuple)
    return {
        "replicas": replicas,
        "placement": draw(st.none() | st.builds(Placement, st.none() | owners, holders, loads)),
        "own_loads": draw(loads),
        "excluded": draw(st.frozensets(st.sampled_from("abcdefg"), max_size=4)),
        "session": draw(st.none() | st.text(max_size=3)),
        "request_id": draw(st.text(max_size=3)),
        "affinity": draw(st.sampled_from(["session", "random"])),
        "load_bound": draw(st.floats(1, 3)),
    }


def load_of(uid, own_loads, placement):
    return own_loads.get(uid, 0) + (placement.loads.get(uid, 0) if placement else 0)


@given(situations())
def test_a_replica_that_may_be_asked_is_chosen_whenever_there_is_one(case) -> None:
    possible = {replica.uid for replica in case["replicas"]} - case["excluded"]
    choice = placed(**case)
    assert (choice is None) == (not possible)
    if choice is not None:
        assert choice.replica in case["replicas"]
        assert choice.replica.uid in possible


@given(situations(), st.randoms())
def test_the_order_in_which_replicas_are_listed_does_not_matter(case, random) -> None:
    shuffled = random.sample(case["replicas"], len(case["replicas"]))
    assert placed(**case) == placed(**{**case, "replicas": shuffled})


@given(situations())
def test_the_owner_is_chosen_unless_it_is_overloaded(case) -> None:
    case |= {"affinity": "session"}
    placement, own_loads = case["placement"], case["own_loads"]
    possible = [replica for replica in case["replicas"] if replica.uid not in case["excluded"]]
    owner = next((r for r in possible if placement and owner_of(r) == placement.owner), None)
    choice = placed(**case)
    if owner is None:
        assert choice is None or choice.reason not in ("owner", "spill")
        return
    shares = {r.uid: load_of(r.uid, own_loads, placement) / r.max_sequences for r in possible}
    mean = sum(load_of(r.uid, own_loads, placement) for r in possible) / sum(r.max_sequences for r in possible)
    full, elsewhere = shares[owner.uid] >= 1, min(shares.values()) < 1
    if full and elsewhere and shares[owner.uid] > case["load_bound"] * mean:
        assert choice.reason == "spill"
        assert shares[choice.replica.uid] < 1
    else:
        assert choice == Choice(owner, "owner")


@given(situations())
def test_nobody_is_sent_to_a_full_replica_while_another_has_a_free_place(case) -> None:
    choice = placed(**case)
    if choice is None or choice.reason in ("owner",) or case["placement"] is None:
        return
    free = [
        r
        for r in case["replicas"]
        if r.uid not in case["excluded"] and load_of(r.uid, case["own_loads"], case["placement"]) < r.max_sequences
    ]
    assert not free or choice.replica in free


@given(st.lists(st.text(max_size=8), unique=True, max_size=60), st.integers(0, 3))
def test_without_a_store_a_replica_that_leaves_or_comes_moves_its_own_sessions_alone(names, gone) -> None:
    for name in names:
        before = placed(placement=None, session=name)
        after = placed(placement=None, session=name, excluded={FOUR[gone].uid})
        assert before.reason == after.reason == "rendezvous"
        assert before.replica == FOUR[gone] or after == before


def test_without_a_store_another_router_makes_the_same_choice() -> None:
    # The order is part of what routers agree on: a change of the hash moves every session of a rolling update.
    order = [replica.uid for replica in rendezvous("session", FOUR)]
    assert order == ["replica-0", "replica-3", "replica-2", "replica-1"]


def test_a_restarted_replica_is_another_one_under_the_same_name() -> None:
    for number in range(40):
        holders = (frozenset({Owner("replica-1", "an earlier life")}),)
        known = Placement(owner=Owner("replica-1", "an earlier life"), holders=holders)
        choice = placed(placement=known, session=str(number))
        assert choice == placed(session=str(number))
        assert choice.reason == "rendezvous"


def assert_spread(at_once: int, place: Callable[[int, Counter[str]], Choice]) -> None:
    """400 requests, so many at a time, go to four replicas about evenly. place: the choice for a request's number and
    the loads that it finds."""
    counts: Counter[str] = Counter()
    running: list[str] = []
    for number in range(400):
        choice = place(number, Counter(running))
        counts[choice.replica.uid] += 1
        running.append(choice.replica.uid)
        if len(running) == at_once:
            running.pop(0)
    assert len(counts) == 4
    assert max(counts.values()) <= 1.3 * 100


@pytest.mark.parametrize("at_once", [1, 4, 40, 400])
def test_requests_without_a_session_are_spread_evenly(at_once: int) -> None:
    def place(number: int, loads: Counter[str]) -> Choice:
        choice = placed(request_id=f"request-{number}", own_loads=loads)
        assert choice.reason == "load"
        return choice

    assert_spread(at_once, place)


@pytest.mark.parametrize("at_once", [20, 40, 400])
def test_new_sessions_with_a_common_beginning_do_not_crowd_on_its_holder(at_once: int) -> None:
    warm: set[Owner] = set()

    def place(number: int, loads: Counter[str]) -> Choice:
        known = Placement(holders=(frozenset(warm),))
        choice = placed(placement=known, session=f"session-{number}", own_loads=loads)
        warm.add(owner_of(choice.replica))
        return choice

    assert_spread(at_once, place)


def test_the_longest_prefix_wins_and_of_its_holders_the_least_loaded() -> None:
    short, long = frozenset(owner_of(r) for r in FOUR[:3]), frozenset(owner_of(r) for r in FOUR[1:3])
    known = Placement(holders=(short, long), loads={"replica-1": 3, "replica-0": 2, "replica-3": 3})
    assert placed(placement=known, session="s") == Choice(FOUR[2], "prefix")
    assert placed(placement=known, session="s", excluded={"replica-2", "replica-1"}) == Choice(FOUR[0], "prefix")


def test_a_full_owner_keeps_its_sessions_while_all_are_about_as_busy() -> None:
    known = Placement(owner=owner_of(FOUR[0]), loads={r.uid: 7 for r in FOUR})
    assert placed(placement=known, own_loads={"replica-0": 1}, session="s") == Choice(FOUR[0], "owner")
    assert placed(placement=known, own_loads={"replica-0": 9}, session="s").reason == "spill"


def test_random_routing_follows_the_request_alone() -> None:
    known = Placement(owner=owner_of(FOUR[0]))
    counts = Counter(placed(placement=known, session="s", request_id=str(n), affinity="random") for n in range(400))
    assert {choice.reason for choice in counts} == {"random"}
    assert {choice.replica for choice in counts} == set(FOUR)
    assert max(counts.values()) < 150
