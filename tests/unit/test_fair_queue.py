"""Fair queueing by itself: order, shares, and waiters that leave."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle2.router.fair_queue import FairQueue

WORK = st.integers(1, 20)


@given(st.lists(st.tuples(st.sampled_from("abc"), WORK), max_size=40))
def test_everything_comes_out_once_and_in_the_order_of_its_tenant(arrivals) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, (tenant, work) in enumerate(arrivals):
        queue.push(tenant, number, work)
    assert queue.work == sum(work for _, work in arrivals)
    popped = [queue.pop() for _ in arrivals]
    assert sorted(popped) == list(range(len(arrivals)))
    for tenant in "abc":
        own = [number for number in popped if arrivals[number][0] == tenant]
        assert own == sorted(own)
    assert len(queue) == queue.work == 0
    assert queue.peek_work() is None


@given(st.lists(WORK, min_size=30, max_size=30), st.lists(WORK, min_size=30, max_size=30), st.integers(1, 29))
def test_two_tenants_that_both_wait_get_equal_work_within_the_largest_of_each(first, second, pops) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    work = {"a": first, "b": second}
    for tenant in "ab":
        for number, amount in enumerate(work[tenant]):
            queue.push(tenant, (tenant, number), amount)
    had = dict.fromkeys("ab", 0)
    for _ in range(pops):
        tenant, number = queue.pop()
        had[tenant] += work[tenant][number]
        assert abs(had["a"] - had["b"]) <= max(first) + max(second)


@given(st.data())
def test_one_that_leaves_leaves_no_trace(data) -> None:
    """A queue in which some were pushed and removed again goes on like one that never saw them."""
    with_leavers: FairQueue[int] = FairQueue()
    without: FairQueue[int] = FairQueue()
    leavers: list[int] = []
    running: list[tuple[str, int]] = []
    for number in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["push", "push", "pop", "settle", "visit", "leave"])):
            case "push":
                tenant, work = data.draw(st.sampled_from("abc")), data.draw(WORK)
                with_leavers.push(tenant, number, work)
                without.push(tenant, number, work)
            case "visit":
                with_leavers.push(data.draw(st.sampled_from("abcd")), number, data.draw(WORK))
                leavers.append(number)
            case "leave" if leavers:
                assert with_leavers.remove(leavers.pop(data.draw(st.integers(0, len(leavers) - 1))))
            case "pop" if len(without):
                for leaver in leavers:  # those that stay would rightly get their turn
                    with_leavers.remove(leaver)
                leavers.clear()
                work = without.peek_work()
                assert with_leavers.peek_work() == work
                popped = without.pop()
                tenant = next(t for t, f in without._flows.items() if f.running > [x for x, _ in running].count(t))
                running.append((tenant, work))
                assert with_leavers.pop() == popped
            case "settle" if running:
                tenant, work = running.pop(data.draw(st.integers(0, len(running) - 1)))
                actual = data.draw(WORK)
                with_leavers.settle(tenant, work, actual)
                without.settle(tenant, work, actual)
    for leaver in leavers:
        with_leavers.remove(leaver)
    assert [with_leavers.pop() for _ in range(len(with_leavers))] == [without.pop() for _ in range(len(without))]


@given(st.lists(st.tuples(st.sampled_from("abc"), WORK), max_size=30), st.sampled_from("abcd"))
def test_the_work_ahead_of_a_newcomer_is_what_starts_before_it(arrivals, tenant) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, (name, work) in enumerate(arrivals):
        queue.push(name, number, work)
    expected = queue.work_ahead(tenant)
    newcomer = len(arrivals)
    queue.push(tenant, newcomer, 1)
    ahead = 0
    while (item := queue.pop()) != newcomer:
        ahead += arrivals[item][1]
    # Every other tenant's item at the border counts in part.
    assert abs(ahead - expected) <= 20 * 3


def test_who_used_less_than_expected_is_charged_what_it_used() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("other", "runs all the time", 1)
    queue.pop()
    queue.push("short answers", "first", 100)
    queue.pop()
    queue.settle("short answers", 100, 5)
    queue.push("other", "a", 10)
    queue.pop()
    queue.push("short answers", "second", 100)
    queue.push("other", "b", 10)
    assert [queue.pop(), queue.pop()] == ["second", "b"]


def test_an_idle_time_earns_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(50):
        queue.push("busy", f"earlier {number}", 10)
        queue.pop()  # and runs on
    for number in range(3):
        queue.push("busy", f"busy {number}", 10)
        queue.push("new", f"new {number}", 10)
    assert [queue.pop() for _ in range(4)] == ["new 0", "busy 0", "new 1", "busy 1"]


def test_tenants_that_owe_nothing_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.push("long answer", -1, 1)
    queue.pop()
    for number in range(3000):
        queue.push(f"tenant {number}", number, 1)
        queue.pop()
        queue.settle(f"tenant {number}", 1, 1)
        assert len(queue._flows) <= 1026
    queue.settle("long answer", 1, 500)
    assert not queue._flows
