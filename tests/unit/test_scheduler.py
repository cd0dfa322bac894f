"""Who is in the batch: classes, ages, preemption, promotion. A machine without a model steps the scheduler."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.engine.pace import Allowance
from eagle2.engine.reuse import PrefixReuse
from eagle2.engine.scheduler import Scheduler
from eagle2.engine.sequence import Sequence, rule_of
from eagle2.kv_cache.slots import OutOfSlotsError, SlotPool, SlotTable
from eagle2.protocol import Priority
from eagle2.telemetry.recorder import Recorder
from eagle2.text.detokenizer import TextStream
from fakes.engines import request


class Machine:
    """Steps a scheduler as the engine does, a token for each sequence that decodes."""

    def __init__(
        self, max_sequences: int = 4, num_slots: int = 1000, *, chunk: int = 64, prefix_cache: bool = False
    ) -> None:
        self.pool = SlotPool(num_slots)
        self.scheduler = Scheduler(self.pool, max_sequences, PrefixReuse(self.pool, Recorder(), enabled=prefix_cache))
        self.max_sequences, self.chunk = max_sequences, chunk
        self.ended: list[Sequence] = []
        self.failed: list[Sequence] = []
        self.num_preempted = 0
        self._ids = itertools.count(1)

    def submit(self, priority: Priority = "interactive", *, prompt: int = 4, output: int = 4) -> Sequence:
        number = next(self._ids)
        asked = request([number, *range(prompt - 1)], max_tokens=output, priority=priority)
        sequence = Sequence(
            id=number,
            request=asked,
            table=SlotTable(self.pool),
            text=cast(TextStream, None),  # nothing is detokenised here
            sink=lambda _: None,
            end_ids=frozenset(),
            length_limit=10_000,
            rule=rule_of(asked),
            tokens=list(asked.prompt_ids),
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        self.num_preempted += len(self.scheduler.admit())
        for sequence in list(self.scheduler.running):
            if sequence.has_root and sequence.num_to_prefill == 0:
                self._decode(sequence)
        read = []
        for sequence, count in self.scheduler.plan_prefill(Allowance(self.chunk)):
            count = min(count, self.pool.num_available)
            if count:
                sequence.table.extend(count)
                read.append(sequence)
        running = self.scheduler.running
        if running and not read and all(sequence.num_to_prefill > 0 for sequence in running):
            self._preempt(running[0])
        for sequence in read:
            if sequence in running and not sequence.has_root and sequence.num_to_prefill == 0:
                self._commit(sequence)
        self.scheduler.check_integrity()

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.scheduler.running and not self.scheduler.waiting:
                return
            self.step()
        raise AssertionError(f"work is left after {steps} steps")

    def _decode(self, sequence: Sequence) -> None:
        while sequence in self.scheduler.running:
            try:
                sequence.table.commit(self.pool.allocate(1), [0])
            except OutOfSlotsError:
                self._preempt(sequence)
                continue
            self._commit(sequence)
            return

    def _commit(self, sequence: Sequence) -> None:
        sequence.tokens.append(0)
        if sequence.num_left <= 0:
            self.scheduler.remove(sequence)
            self.ended.append(sequence)

    def _preempt(self, wanting: Sequence) -> None:
        self.num_preempted += 1
        if self.scheduler.preempt_newest() is None:
            self.scheduler.remove(wanting)
            self.failed.append(wanting)


def test_interactive_before_batch_and_old_before_new() -> None:
    machine = Machine(max_sequences=1)
    kinds: list[Priority] = ["batch", "interactive", "batch", "interactive"]
    batch, first, later, second = (machine.submit(kind) for kind in kinds)
    machine.run()
    assert machine.ended == [first, second, batch, later]


def test_an_interactive_request_takes_the_place_of_the_newest_batch_request() -> None:
    machine = Machine(max_sequences=2)
    old, new = machine.submit("batch", output=20), machine.submit("batch", output=20)
    for _ in range(5):
        machine.step()
    written = list(new.tokens)
    asked = machine.submit()
    machine.step()
    assert machine.scheduler.running == [asked, old]
    assert machine.scheduler.waiting == [new]
    assert new.tokens == written, "what was written stays"
    assert machine.num_preempted == 1
    later = machine.submit("batch")
    assert machine.scheduler.waiting == [new, later], "it is as old as it was"
    machine.run()
    assert len(machine.ended) == 4


def test_a_batch_request_preempts_nobody() -> None:
    machine = Machine(max_sequences=2)
    running = [machine.submit(output=20), machine.submit("batch", output=20)]
    machine.step()
    machine.submit("batch")
    machine.step()
    assert machine.scheduler.running == running


def test_an_interactive_request_preempts_no_interactive_one() -> None:
    machine = Machine(max_sequences=2)
    running = [machine.submit(output=20), machine.submit(output=20)]
    machine.step()
    machine.submit()
    machine.step()
    assert machine.scheduler.running == running


def test_slots_of_batch_requests_are_taken_when_that_is_enough() -> None:
    machine = Machine(max_sequences=8, num_slots=100)
    one, two = machine.submit("batch", prompt=30, output=40), machine.submit("batch", prompt=30, output=40)
    machine.step()
    asked = machine.submit(prompt=50, output=2)
    machine.step()
    assert machine.scheduler.running == [asked, one]
    assert machine.scheduler.waiting == [two]
    # One that finds no room even without the batch request leaves it alone, and is admitted when others have ended.
    large = machine.submit(prompt=80, output=2)
    machine.step()
    assert one in machine.scheduler.running
    machine.run()
    assert {one, two, large} <= set(machine.ended)
    assert not machine.failed


def test_for_want_of_slots_the_newest_of_the_lowest_class_goes() -> None:
    machine = Machine()
    batch = [machine.submit("batch", output=50) for _ in range(2)]
    interactive = [machine.submit(output=50) for _ in range(2)]
    machine.step()
    assert [machine.scheduler.preempt_newest() for _ in range(4)] == [batch[1], batch[0], interactive[1], None]
    assert machine.scheduler.waiting == [interactive[1], *batch]


def test_prompts_are_read_one_after_the_other_interactive_ones_first() -> None:
    machine = Machine(max_sequences=4)
    batch = machine.submit("batch", prompt=40)
    first, second = machine.submit(prompt=40), machine.submit(prompt=40)
    machine.scheduler.admit()
    plan = machine.scheduler.plan_prefill(Allowance(100))
    assert plan == [(first, 40), (second, 40), (batch, 20)]


def test_a_short_prompt_need_not_wait_for_a_long_one() -> None:
    machine = Machine(max_sequences=5)
    long, short, other = machine.submit(prompt=500), machine.submit(prompt=50), machine.submit(prompt=30)
    middling, batch = machine.submit(prompt=51), machine.submit("batch", prompt=10)
    machine.scheduler.admit()
    plan = machine.scheduler.plan_prefill(Allowance(100))
    assert plan == [(short, 50), (long, 50)], "one a step, which takes half of it at most"
    short.table.extend(50)
    assert machine.scheduler.plan_prefill(Allowance(100)) == [(other, 30), (long, 70)]
    other.table.extend(30)
    assert machine.scheduler.plan_prefill(Allowance(100)) == [(long, 100)], "neither the middling nor the batch one"
    long.table.extend(450)
    assert machine.scheduler.plan_prefill(Allowance(100)) == [(long, 50), (middling, 50)]
    assert batch in machine.scheduler.running


def test_a_stream_of_short_prompts_takes_half_of_a_long_ones_speed_at_most() -> None:
    machine = Machine(max_sequences=3, num_slots=3000, chunk=64)
    long = machine.submit(prompt=1280, output=1)
    for _ in range(42):
        while len(machine.scheduler.waiting) < 4:
            machine.submit(prompt=32, output=1)
        machine.step()
        if long in machine.ended:
            break
    assert long in machine.ended, "40 steps at half speed"
    assert len(machine.ended) > 20


@pytest.mark.parametrize("places", [1, 2, 3, 4, 8])
def test_an_endless_stream_of_interactive_requests_starves_no_batch_request(places: int) -> None:
    """As many interactive requests as fit twice are always there; batch ones get their share and no more."""
    machine = Machine(max_sequences=places)
    batch = [machine.submit("batch", output=30) for _ in range(4)]
    most = max(1, places // 4)
    for _ in range(4000):
        while sum(not sequence.is_deferrable for sequence in machine.scheduler.waiting) < 2 * places:
            machine.submit(output=5)
        machine.step()
        running = [s for s in machine.scheduler.running if s.request.priority == "batch"]
        assert len(running) <= most, "a quarter of the places, or one"
        if all(sequence in machine.ended for sequence in batch):
            break
    else:
        raise AssertionError(f"{[s.num_output for s in batch]} of 30 tokens after 4,000 steps")
    assert [s for s in machine.ended if s in batch] == batch, "oldest first"


def test_between_two_promotions_interactive_requests_get_in() -> None:
    machine = Machine(max_sequences=1)
    batch = [machine.submit("batch", output=10) for _ in range(3)]
    for _ in range(12):
        machine.submit(output=2)
    machine.run()
    kinds = "".join("b" if sequence in batch else "i" for sequence in machine.ended)
    assert kinds == "iiibiiibiiibiii"


def test_a_promoted_request_keeps_its_place() -> None:
    machine = Machine(max_sequences=1)
    batch = machine.submit("batch", output=50)
    for _ in range(3):
        machine.submit(output=2)
    while batch not in machine.scheduler.running:
        machine.step()
    machine.submit()
    machine.step()
    assert batch.promoted
    assert machine.scheduler.running == [batch]


_ARRIVAL = st.tuples(
    st.integers(0, 5),  # steps before it
    st.sampled_from(["interactive", "batch"]),
    st.integers(1, 60),  # prompt
    st.integers(1, 30),  # output
)


@settings(deadline=None, max_examples=100)
@given(
    arrivals=st.lists(_ARRIVAL, max_size=25),
    max_sequences=st.integers(1, 6),
    num_slots=st.integers(92, 300),
    chunk=st.integers(1, 64),
    prefix_cache=st.booleans(),
)
def test_all_end_and_nothing_leaks(
    arrivals: list[tuple[int, Priority, int, int]],
    max_sequences: int,
    num_slots: int,
    chunk: int,
    prefix_cache: bool,
) -> None:
    """Whatever arrives when: the batch is never too large and in order (``check_integrity`` at every step), everybody
    gets all tokens of the answer, and all slots come back. The pool holds any one of them, so that none may fail."""
    machine = Machine(max_sequences, num_slots, chunk=chunk, prefix_cache=prefix_cache)
    asked = []
    for steps, priority, prompt, output in arrivals:
        for _ in range(steps):
            machine.step()
            _check_classes(machine)
        asked.append(machine.submit(priority, prompt=prompt, output=output))
    machine.run()
    assert not machine.failed
    assert sorted(sequence.id for sequence in machine.ended) == [sequence.id for sequence in asked]
    assert all(sequence.num_output == sequence.request.stop.max_tokens for sequence in asked)
    assert machine.pool.num_used == 0


def _check_classes(machine: Machine) -> None:
    """No batch request runs that could make way for an interactive one that waits."""
    scheduler = machine.scheduler
    promoted = [s for s in [*scheduler.running, *scheduler.waiting] if s.promoted]
    assert len(promoted) <= max(1, machine.max_sequences // 4)
    scheduler.admit()
    if scheduler.waiting and not scheduler.waiting[0].is_deferrable and not scheduler.waiting[0].promoted:
        deferrable = [s for s in scheduler.running if s.is_deferrable]
        if deferrable and len(scheduler.running) > len(deferrable):
            need = len(scheduler.waiting[0].tokens) + 1
            room = machine.pool.num_available + sum(len(s.table) for s in deferrable)
            promised = sum(s.num_to_prefill + 1 for s in scheduler.running if s.num_to_prefill > 0)
            assert need + promised > room, "it would have had room"
        else:
            assert not deferrable, "the place of a batch request can always be had"


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_removal_from_anywhere_leaks_nothing(data: st.DataObject) -> None:
    """Cancelled, or past their deadline: waiting, reading, decoding."""
    machine = Machine(max_sequences=3, num_slots=120, chunk=8, prefix_cache=data.draw(st.booleans()))
    kinds = st.sampled_from(["interactive", "batch"])
    for _ in range(data.draw(st.integers(1, 8))):
        machine.submit(data.draw(kinds), prompt=data.draw(st.integers(1, 40)), output=data.draw(st.integers(1, 20)))
    for _ in range(data.draw(st.integers(0, 25))):
        machine.step()
        there = [*machine.scheduler.running, *machine.scheduler.waiting]
        if there and data.draw(st.booleans()):
            machine.scheduler.remove(data.draw(st.sampled_from(there)))
            machine.scheduler.check_integrity()
    machine.run()
    assert machine.pool.num_used == 0
