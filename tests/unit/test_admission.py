"""Admission: no place is lost or given twice, nobody waits beside a free one, and everybody's turn comes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.config import AdmissionSettings
from eagle2.errors import OverloadedError, UnavailableError
from eagle2.protocol.generation import Usage
from eagle2.router.admission import Admission, Place
from eagle2.router.failures import GenerationError
from eagle2.router.load import Capacity
from eagle2.router.work import WorkEstimate
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

SECOND_PER_CYCLE = Usage(prompt_tokens=1, completion_tokens=9, cycles=9)  # and one cycle of prefill


@dataclass
class House:
    """An admission with everything that surrounds it, and the requests that came."""

    places: int = 2
    total: int | None = None
    now: float = 1000.0
    settings: AdmissionSettings = field(default_factory=AdmissionSettings)
    poll_s: float = 60.0
    recorder: Recorder = field(default_factory=Recorder)
    work: WorkEstimate = field(default_factory=lambda: WorkEstimate(256))
    log: list[str] = field(default_factory=list)
    tasks: list[asyncio.Task[Place]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admission = Admission(
            self.settings,
            lambda: Capacity(self.places if self.total is None else self.total, self.places),
            self.work,
            self.recorder,
            clock=lambda: self.now,
            poll_s=self.poll_s,
        )

    def come(self, name: str, tenant="t", priority="interactive", work=10.0, deadline=None) -> asyncio.Task[Place]:
        async def wait() -> Place:
            place = await self.admission.acquire(tenant, priority, work, deadline)
            self.log.append(name)
            return place

        self.tasks.append(asyncio.create_task(wait()))
        return self.tasks[-1]

    def depth(self, priority="interactive") -> float:
        return self.recorder.get(metrics.QUEUE_DEPTH, priority=priority)

    def refusals(self, reason: str) -> float:
        return self.recorder.get(metrics.REFUSALS, reason=reason)

    def learn(self) -> None:
        """A cycle takes a second."""
        self.work.learn(SECOND_PER_CYCLE, 100, 10.0)


async def settle() -> None:
    """Let every task run until all wait."""
    for _ in range(6):
        await asyncio.sleep(0)


async def end(*tasks: asyncio.Task[Place]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_places_and_waiters_agree_whatever_happens(data) -> None:
    async def scenario() -> None:
        house = House(places=data.draw(st.integers(1, 4)))
        most = house.places
        waiting: list[asyncio.Task[Place]] = []
        holding: list[Place] = []
        names = iter(range(1000))
        for _ in range(data.draw(st.integers(1, 30))):
            event = data.draw(st.sampled_from(["come", "come", "come", "leave", "release", "resize", "let run"]))
            if event == "come":
                tenant, priority = (
                    data.draw(st.sampled_from("ab")),
                    data.draw(st.sampled_from(["interactive", "batch"])),
                )
                waiting.append(house.come(str(next(names)), tenant, priority, data.draw(st.floats(1, 9))))
            elif event == "leave" and waiting:
                waiting[data.draw(st.integers(0, len(waiting) - 1))].cancel()
            elif event == "release" and holding:
                holding.pop(data.draw(st.integers(0, len(holding) - 1))).release()
            elif event == "resize":
                house.places = data.draw(st.integers(1, 4))
                house.admission.refresh()
            elif event == "let run":
                # Not always to the end: events meet tasks in every state between.
                for _ in range(data.draw(st.integers(1, 4))):
                    await asyncio.sleep(0)
            most = max(house.places, most)
            for task in [task for task in waiting if task.done()]:
                waiting.remove(task)
                with suppress(asyncio.CancelledError):
                    holding.append(task.result())
            assert house.admission.held <= most
        await settle()
        for task in [task for task in waiting if task.done()]:
            waiting.remove(task)
            with suppress(asyncio.CancelledError):
                holding.append(task.result())
        assert house.admission.held == len(holding)
        assert house.admission.queued == len(waiting) == house.depth() + house.depth("batch")
        assert not waiting or len(holding) >= house.places
        while holding or waiting:
            if holding:
                holding.pop().release()
            await settle()
            for task in [task for task in waiting if task.done()]:
                waiting.remove(task)
                holding.append(task.result())
            assert holding or not waiting, "a waiter was forgotten"
        assert (house.admission.held, house.admission.queued) == (0, 0)
        assert house.admission.queued_seconds() == house.admission.in_flight_seconds() == 0

    asyncio.run(scenario())


async def admitted_in_order(house: House, count: int) -> list[str]:
    """Who is let in while one place after the other is given back."""
    for _ in range(count):
        await settle()
        done = [task for task in house.tasks if task.done()]
        assert done
        for task in done:
            house.tasks.remove(task)
            house.now += 1000  # it took all that was expected
            task.result().release()
    await settle()
    await end(*house.tasks)
    return house.log


async def test_interactive_requests_come_first_and_batch_has_its_share() -> None:
    house = House(places=1, settings=AdmissionSettings(batch_share=0.25))
    for number in range(12):
        house.come(f"b{number}", priority="batch")
        house.come(f"i{number}")
    order = await admitted_in_order(house, 16)
    assert order[:2] == ["b0", "i0"]  # the first came to an empty house
    assert [name[0] for name in order[1:14]] == list("iiibiiibiiibi")
    assert "b11" not in order


async def test_a_batch_request_has_the_fleet_while_nobody_else_wants_it() -> None:
    house = House(places=3)
    tasks = [house.come(str(number), priority="batch") for number in range(3)]
    await settle()
    assert house.log == ["0", "1", "2"]
    assert house.depth("batch") == 0
    await end(*tasks)


async def test_tenants_share_by_work_and_not_by_requests() -> None:
    house = House(places=1)
    for number in range(30):
        house.come(f"long {number}", "a", work=30)
        house.come(f"short {number}", "b", work=10)
    order = await admitted_in_order(house, 28)
    assert abs(sum(name.startswith("short") for name in order) - 3 * sum(name.startswith("long") for name in order)) < 5


async def test_one_tenant_in_front_of_a_long_queue_of_another_waits_for_one_turn_at_most() -> None:
    house = House(places=1)
    for number in range(50):
        house.come(f"flood {number}", "a")
    await settle()
    house.come("lone", "b")
    assert "lone" in await admitted_in_order(house, 3)


async def test_an_answer_is_charged_what_it_took() -> None:
    house = House(places=2)
    runs_on = house.come("runs on", "c", work=1)
    await settle()
    short = house.come("estimated long", "a", work=4000)
    await settle()
    short.result().finished(Usage(prompt_tokens=1, completion_tokens=4, cycles=2), 8000)
    blocker = house.come("b1", "b", work=10)
    await settle()
    house.come("b2", "b", work=10)
    house.come("a2", "a", work=10)
    await settle()
    short.result().release()  # three cycles
    blocked = await asyncio.wait_for(blocker, 5)
    await settle()
    house.now += 1000
    blocked.release()
    house.places = 3
    house.admission.refresh()
    await settle()
    assert house.log == ["runs on", "estimated long", "b1", "a2", "b2"]
    await end(runs_on)


async def test_a_full_queue_says_when_to_come_again() -> None:
    house = House(places=1, settings=AdmissionSettings(max_queued=2))
    house.learn()
    tasks = [house.come(str(number), work=5) for number in range(3)]
    await settle()
    with pytest.raises(OverloadedError) as refused:
        await house.admission.acquire("t", "interactive", 5)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert refused.value.retry_after_s == 10  # two requests of five cycles, a second each, on one place
    assert house.refusals("queue_full") == 1
    assert house.depth() == 2
    await end(*tasks)


async def test_a_full_queue_gives_way_to_who_has_fewer_in_it() -> None:
    house = House(places=1, settings=AdmissionSettings(max_queued=4))
    flood = [house.come(f"a{number}", "a") for number in range(5)]
    await settle()
    other = house.come("b0", "b")
    await settle()
    with pytest.raises(OverloadedError):
        await flood[4]
    assert [task.done() for task in flood] == [True, False, False, False, True]
    assert house.admission.queued == 4
    more = [house.come(f"b{number}", "b") for number in range(1, 4)]
    await settle()
    assert sum(task.done() for task in more) == 2  # two of each wait, and nobody has a lesser claim
    await end(other, *flood, *more)


async def test_a_full_queue_of_batch_requests_gives_way_to_an_interactive_one() -> None:
    house = House(places=1, settings=AdmissionSettings(max_queued=2))
    batch = [house.come(f"b{number}", priority="batch") for number in range(3)]
    await settle()
    one = house.come("i")
    await settle()
    assert (house.depth(), house.depth("batch")) == (1, 1)
    with pytest.raises(OverloadedError):
        await batch[2]
    await end(one, *batch)


async def test_a_wait_that_would_be_too_long_is_refused_at_once_and_only_to_who_would_have_it() -> None:
    house = House(places=2, settings=AdmissionSettings(max_wait_s=60))
    await end(*(before := [house.come(str(number), "a", work=70) for number in range(20)]))
    assert not [task for task in before if not task.cancelled()]  # nothing was known, nobody was refused
    house.learn()
    tasks = [house.come(str(number), "a", work=70) for number in range(4)]
    await settle()
    with pytest.raises(OverloadedError) as refused:
        await house.admission.acquire("a", "interactive", 1)
    assert (refused.value.code, refused.value.retry_after_s) == ("queue_full", 70)
    assert house.refusals("expected_wait") == 1
    assert house.recorder.get(metrics.QUEUED_WORK_SECONDS) == 140
    assert house.recorder.get(metrics.IN_FLIGHT_WORK_SECONDS) == 140
    assert house.admission.autoscaling_stats() == {"in_flight": 2, "queued_seconds": 140}
    other = house.come("of another tenant", "b")
    await settle()
    assert not other.done()
    await end(other, *tasks)


async def test_a_wait_ends_after_the_longest_one_even_if_nobody_foresaw_it() -> None:
    house = House(places=1, settings=AdmissionSettings(max_wait_s=0.05))
    first = house.come("first")
    await settle()
    with pytest.raises(OverloadedError):
        await asyncio.wait_for(house.admission.acquire("t", "interactive", 1), 20)
    assert house.depth() == 0
    await end(first)


async def test_a_deadline_holds_in_the_queue_too() -> None:
    house = House(places=1)
    first = house.come("first")
    await settle()
    with pytest.raises(GenerationError) as late:
        await asyncio.wait_for(house.admission.acquire("t", "interactive", 1, deadline=house.now + 0.05), 20)
    assert late.value.code == "deadline_exceeded"
    assert (house.depth(), house.admission.held) == (0, 1)
    first.result().release()
    with pytest.raises(GenerationError):
        await house.admission.acquire("t", "interactive", 1, deadline=house.now)
    assert house.admission.held == 0
    assert house.refusals("deadline_exceeded") == 2


async def test_nobody_waits_for_a_fleet_that_never_was() -> None:
    house = House(places=0)
    with pytest.raises(UnavailableError):
        await house.admission.acquire("t", "interactive", 1)
    assert house.refusals("not_ready") == 1


async def waiting_for_a_fleet_that_went() -> tuple[House, asyncio.Task[Place]]:
    """Its one replica has served somebody and is gone, and somebody else has come."""
    house = House(places=1)
    first = house.come("first")
    await settle()
    first.result().release()
    house.places = 0
    waiting = house.come("second")
    await settle()
    return house, waiting


async def test_a_fleet_that_is_gone_for_a_moment_fails_nobody() -> None:
    house, waiting = await waiting_for_a_fleet_that_went()
    house.now += 9.9
    house.admission.refresh()
    await settle()
    assert not waiting.done()
    house.places = 1
    house.admission.refresh()
    (await asyncio.wait_for(waiting, 20)).release()


async def test_a_fleet_that_stays_away_fails_those_who_wait_and_those_who_come() -> None:
    house, waiting = await waiting_for_a_fleet_that_went()
    house.now += 10
    house.admission.refresh()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting, 20)
    with pytest.raises(UnavailableError):
        await house.admission.acquire("t", "interactive", 1)
    assert house.depth() == 0


async def test_places_taken_by_other_routers_are_no_outage() -> None:
    house = House(places=0, total=8)
    waiting = house.come("first")
    await settle()
    house.now += 3600
    house.admission.refresh()
    await settle()
    assert not waiting.done()
    await end(waiting)


async def test_a_fleet_that_grows_without_notice_is_found() -> None:
    house = House(places=1, poll_s=0.01)
    tasks = [house.come(str(number)) for number in range(4)]
    await settle()
    house.places = 4
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert house.admission.held == 4


async def test_two_hundred_who_leave_before_their_turn_leave_nothing() -> None:
    house = House(places=2)
    tasks = [
        house.come(str(number), f"tenant {number % 7}", "batch" if number % 3 else "interactive")
        for number in range(200)
    ]
    await settle()
    assert house.depth() + house.depth("batch") == 198
    holders = [task.result() for task in tasks if task.done()]
    await end(*[task for task in tasks if not task.done()])
    assert (house.depth(), house.depth("batch")) == (0, 0)
    assert house.admission.queued_seconds() == 0
    for place in holders:
        place.release()
        place.release()
    assert house.admission.held == house.recorder.get(metrics.PLACES_HELD) == 0


async def test_a_place_given_in_the_moment_of_leaving_goes_to_the_next() -> None:
    house = House(places=1)
    first, second, third = (house.come(str(number)) for number in range(3))
    await settle()
    second.cancel()
    first.result().release()  # the second has its place before it can know that it was cancelled
    await settle()
    assert third.done()
    assert house.admission.held == 1
    assert second.cancelled()


async def test_the_block_gives_its_place_back_whatever_happens() -> None:
    house = House(places=1)
    with pytest.raises(KeyError):
        async with house.admission.place("t", "interactive", 1):
            assert house.admission.held == 1
            raise KeyError
    assert house.admission.held == 0


async def test_an_error_of_an_overloaded_router_survives_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(OverloadedError("Full.", retry_after_s=3.0)))
    assert (error.message, error.retry_after_s, error.code, error.status) == ("Full.", 3.0, "queue_full", 429)


# What a request costs


def test_estimates_follow_what_answers_took() -> None:
    work = WorkEstimate(256)
    assert not work.learned
    for _ in range(20):
        work.learn(Usage(prompt_tokens=512, completion_tokens=90, cached_tokens=256, cycles=30), 4096, 3.1)
    assert work.learned
    assert work.cycles(512, 4096) == pytest.approx(2 + 30)
    assert work.cycles(1, 30) == pytest.approx(1 + 10)
    assert work.seconds(31) == pytest.approx(3.1)
    assert work.cycles_in(3.1) == pytest.approx(31)


def test_answers_that_were_cut_short_do_not_make_others_look_short() -> None:
    work = WorkEstimate(256)
    work.learn(Usage(prompt_tokens=1, completion_tokens=400, cycles=200), 4096, 1.0)
    for _ in range(100):
        work.learn(Usage(prompt_tokens=1, completion_tokens=8, cycles=4), 8, 1.0)
    assert work.cycles(1, 4096) == pytest.approx(1 + 200)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**4), st.integers(0, 10**4), st.floats(0, 1e4))
def test_estimates_stay_above_nothing(prompt, max_tokens, completion, cycles, seconds) -> None:
    work = WorkEstimate(256)
    taken = work.learn(Usage(prompt, completion, cycles=cycles), max_tokens, seconds)
    assert taken > 0
    assert work.cycles(prompt, max_tokens) > 0
    assert work.seconds(1.0) > 0
