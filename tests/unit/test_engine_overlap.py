"""Two halves of a batch, one drafted for while the other is verified: the same tokens, and only where it pays."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eagle2.config import Overlap
from eagle2.engine.budget import AdaptiveBudget
from eagle2.engine.cohorts import Cohorts
from eagle2.engine.costs import CostCurve, DraftCosts, StepCosts, sizes_up_to
from eagle2.engine.drafting import Asked, Decoding, Drafting
from eagle2.engine.overlap import OverlapChoice
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.transport.base import ProposerLink
from fakes.clocks import ManualClock, TimedLink, time_forwards
from fakes.engines import PROMPTS, Answer, EngineKit, draft_head, plain, request
from fakes.links import DelayedLink, DuplicatingLink, DyingLink, StaleLink

REQUESTS = [
    request(prompt, max_tokens=12 + 5 * i, ignore_eos=True, temperature=float(i % 2), seed=i, **extra)
    for i, (prompt, extra) in enumerate(
        zip(PROMPTS[:6], [{}, {}, {"frequency_penalty": 0.7}, {"top_p": 0.8}, {"stop": ["the"]}, {}], strict=True)
    )
]
SHAPE = TreeShape(4, 4, 12)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Each alone and without speculation."""
    return [EngineKit(None).answer(plain(one)).ids for one in REQUESTS]


def budget(verify: Callable[[float], float]) -> AdaptiveBudget:
    sizes = sizes_up_to(8 * SHAPE.num_nodes)
    costs = CostCurve(sizes, [verify(size) for size in sizes])
    return AdaptiveBudget(SHAPE, StepCosts(costs), DraftCosts(CostCurve((1, 8), (0.001, 0.002))))


LINKS: dict[str, Callable[[ProposerLink], ProposerLink]] = {
    "well behaved": lambda link: link,
    "late": lambda link: DelayedLink(link, late=1),
    "so late that there is nobody to ask": lambda link: DelayedLink(link, late=3),
    "doubled": DuplicatingLink,
    "older replies again": StaleLink,
    "lost while its answer is awaited": lambda link: DyingLink(link, 7),
    "lost when it is asked": lambda link: DyingLink(link, 7, at_send=True),
}


@pytest.mark.parametrize("name", LINKS)
def test_the_same_tokens_whatever_becomes_of_the_answers(name: str, expected: list[list[int]]) -> None:
    timeout_s = 0.0 if "late" in name else 30.0
    kit = EngineKit(draft_head(), overlap="on", wrap=LINKS[name], timeout_s=timeout_s)
    assert [answer.ids for answer in kit.answers(*REQUESTS)] == expected
    assert kit.stats.get(metrics.OVERLAPPED_STEPS) > 10 or name.startswith("so late")
    if name in ("late", "doubled", "older replies again"):
        assert kit.stats.get(metrics.STALE_REPLIES) > 0
    if name.startswith("lost"):
        assert kit.stats.get(metrics.PAIRINGS) > 1


@pytest.mark.parametrize("verify", [lambda _: 0.02, lambda rows: 0.02 * rows], ids=["large trees", "small ones"])
def test_the_same_tokens_with_trees_chosen_by_cost(verify: Callable[[float], float], expected: list[list[int]]) -> None:
    kit = EngineKit(draft_head(), overlap="on", shape=SHAPE, budget=budget(verify))
    assert [answer.ids for answer in kit.answers(*REQUESTS)] == expected


@pytest.mark.parametrize("slots", [110, 140])
def test_the_same_tokens_when_slots_run_out(slots: int, expected: list[list[int]]) -> None:
    kit = EngineKit(draft_head(num_slots=slots), overlap="on", num_slots=slots)
    assert [answer.ids for answer in kit.answers(*REQUESTS)] == expected
    assert kit.stats.get(metrics.NUM_PREEMPTIONS) > 0
    assert kit.stats.get(metrics.OVERLAPPED_STEPS) > 10


@pytest.mark.parametrize("seed", range(4))
def test_at_random_moments_readers_leave_and_sequences_are_put_back(seed: int) -> None:
    """Between a question and its answer too: nothing leaks on either side, and whoever stays gets its tokens."""
    chance = random.Random(seed)
    kit = EngineKit(
        draft_head(num_slots=500),
        overlap="on",
        num_slots=chance.choice([260, 1000]),
        max_sequences=5,
        prefill_chunk=chance.choice([7, 32]),
        wrap=lambda link: DyingLink(link, 15),
    )
    asked = [
        request(
            PROMPTS[chance.randrange(len(PROMPTS))][:50],
            max_tokens=chance.randint(1, 25),
            ignore_eos=True,
            temperature=chance.choice([0.0, 1.0]),
            seed=i,
            speculation=chance.random() < 0.8,
        )
        for i in range(10)
    ]
    answers: list[Answer] = []
    sequences, cancelled = [], set()
    for one in asked:
        answers.append(Answer())
        sequences.append(kit.engine.submit(one, answers[-1].commits.append))
        for _ in range(chance.randint(0, 6)):
            kit.engine.step()
            kit.engine.scheduler.check_integrity()
            if chance.random() < 0.15:
                kit.engine.departures.preempt()
        victim = chance.randrange(len(sequences))
        if chance.random() < 0.3 and sequences[victim].finish_reason is None:
            kit.engine.cancel(sequences[victim])
            cancelled.add(victim)
    kit.run()
    kit.check_idle()
    alone = EngineKit(None)
    for i, (one, answer) in enumerate(zip(asked, answers, strict=True)):
        ids = alone.answer(plain(one)).ids
        assert answer.ids == (ids[: len(answer.ids)] if i in cancelled else ids), i


def test_all_readers_leave_while_an_answer_is_awaited() -> None:
    kit = EngineKit(draft_head(), overlap="on")
    sequences = [kit.engine.submit(one, lambda _: None) for one in REQUESTS[:4]]
    while not kit.stats.get(metrics.OVERLAPPED_STEPS):
        kit.engine.step()
    for sequence in sequences:
        kit.engine.cancel(sequence)
    assert not kit.engine.step()
    kit.check_idle()


def test_an_answer_about_a_sequence_that_was_put_back_is_dropped() -> None:
    kit = EngineKit(draft_head(), overlap="on")
    answers = [kit.submit(one) for one in REQUESTS[:4]]
    while not kit.stats.get(metrics.OVERLAPPED_STEPS):
        kit.engine.step()
    dropped = kit.stats.get(metrics.STALE_REPLIES)
    for _ in range(3):  # both halves: one of them was asked about
        kit.engine.departures.preempt()
    kit.engine.step()
    assert kit.stats.get(metrics.STALE_REPLIES) > dropped
    kit.run()
    kit.check_idle()
    assert [answer.ids for answer in answers] == [EngineKit(None).answer(plain(one)).ids for one in REQUESTS[:4]]


def constant(seconds: float) -> Callable[[int], float]:
    return lambda _: seconds


def by_sequence(seconds: float) -> Callable[[int], float]:
    return lambda sequences: seconds * sequences


def seconds_of_four(
    draft_s: Callable[[int], float], verify_s: Callable[[int], float], overlap: Overlap, *, is_blocking: bool = False
) -> float:
    """What four generations take on two devices with these costs for so many sequences."""
    clock = ManualClock()
    kit = EngineKit(
        draft_head(),
        overlap=overlap,
        clock=clock,
        wrap=lambda link: TimedLink(link, clock, draft_s, is_blocking=is_blocking),
    )
    time_forwards(kit.target, clock, lambda rows: verify_s(len(rows.starts) - 1))
    kit.answers(*(request(PROMPTS[0], max_tokens=130, ignore_eos=True, seed=i) for i in range(4)))
    return clock.now


def test_two_halves_overlapped_against_the_same_halves_one_after_the_other() -> None:
    """Drafting 3 ms, verifying 6 ms, for half a batch as well: 6 ms instead of 9 for a half."""
    costs = constant(0.003), constant(0.006)
    overlapped = seconds_of_four(*costs, "on")
    assert seconds_of_four(*costs, "on", is_blocking=True) / overlapped > 1.4
    assert seconds_of_four(*costs, "off") < overlapped, "the whole batch at once takes 9 ms, two halves take 12"


def test_overlap_against_the_whole_batch_where_half_of_it_takes_half_the_time() -> None:
    costs = by_sequence(0.003 / 4), by_sequence(0.006 / 4)
    assert seconds_of_four(*costs, "off") / seconds_of_four(*costs, "on") > 1.4


@dataclass
class Devices:
    """Cohorts over a proposer and a target that only take time; every sequence goes on for ever."""

    draft_s: Callable[[int], float]
    verify_s: Callable[[int], float]
    slowdown: float = 1.0  # of both while both work
    accepted: int = 1
    clock: ManualClock = field(default_factory=ManualClock)
    stats: Recorder = field(default_factory=Recorder)
    is_possible: bool = True
    rounds: float = 0.0  # steps of each sequence
    split_s: float = 0.0
    _ready: float = 0.0

    def __post_init__(self) -> None:
        self.choice = OverlapChoice("auto")
        self.cohorts = Cohorts(cast("Drafting", self), self.choice, self.stats, clock=self.clock)

    def ask(self, sequences: Sequence[Any]) -> Asked:
        self._ready = self.clock.now + self.draft_s(len(sequences))
        return Asked(list(sequences), [], cast("Any", object()), 0.0)

    def collect(self, asked: Asked, *, is_alone: bool) -> list[Decoding]:
        if not is_alone:
            self._ready += (self.slowdown - 1) * self.draft_s(len(asked.sequences))
        self.clock.wait_until(self._ready)
        return [cast("Decoding", SimpleNamespace(sequence=sequence)) for sequence in asked.sequences]

    def run(self, sequences: int, seconds: float) -> float:
        """Rounds of all sequences per second."""
        running = [cast("Any", SimpleNamespace(decodes=True, tokens=[0])) for _ in range(sequences)]
        began, rounds = self.clock.now, self.rounds
        while self.clock.now < began + seconds:
            start = self.clock.now
            items = self.cohorts.turn(running)
            both = self.cohorts.turns == 2
            self.clock.now += self.verify_s(len(items)) * (self.slowdown if both else 1.0)
            for item in items:
                item.sequence.tokens.extend([1] * (1 + self.accepted))
            self.cohorts.verified(has_prefill=False)
            self.rounds += len(items) / sequences
            self.split_s += both * (self.clock.now - start)
        return (self.rounds - rounds) / (self.clock.now - began)


def test_halves_are_not_taken_up_where_they_take_as_long_as_the_whole() -> None:
    """12 ms a round are more than 9: a trial shows it, and trials cost next to nothing."""
    devices = Devices(constant(0.003), constant(0.006))
    assert devices.run(8, 60.0) > 0.99 / 0.009
    assert 1 <= devices.stats.get(metrics.OVERLAP_TRIALS) <= 60 * 0.02 / (8 * 0.006)
    assert devices.split_s < 0.02 * 60


def test_halves_are_not_even_tried_where_half_as_many_sequences_are_known_to_take_as_long() -> None:
    devices = Devices(constant(0.003), constant(0.006))
    devices.run(4, 1.0)
    devices.run(8, 60.0)
    assert devices.stats.get(metrics.OVERLAP_TRIALS) == 0


def test_halves_are_taken_up_where_they_take_half_the_time() -> None:
    devices = Devices(by_sequence(0.003 / 8), by_sequence(0.006 / 8))
    devices.run(8, 12.0)
    assert devices.run(8, 60.0) > 1.4 / 0.009
    assert devices.split_s > 0.95 * 60


def test_two_sides_that_slow_each_other_down_are_not_run_at_once() -> None:
    """Cores that both need: nothing that each costs alone would tell."""
    devices = Devices(by_sequence(0.003 / 8), by_sequence(0.006 / 8), slowdown=1.6)
    assert devices.run(8, 60.0) > 0.99 / 0.009
    assert devices.stats.get(metrics.OVERLAP_TRIALS) > 0


def test_it_is_given_up_when_it_no_longer_pays() -> None:
    devices = Devices(by_sequence(0.003 / 8), by_sequence(0.006 / 8))
    devices.run(8, 20.0)
    devices.slowdown = 1.7
    devices.run(8, 20.0)
    devices.split_s = 0.0
    assert devices.run(8, 40.0) > 0.98 / 0.009
    assert devices.split_s < 0.02 * 40


def test_where_drafting_costs_nothing_there_is_nothing_to_try() -> None:
    devices = Devices(constant(0.0001), by_sequence(0.001))
    devices.run(8, 30.0)
    assert devices.stats.get(metrics.OVERLAP_TRIALS) == 0


def test_one_sequence_is_never_split() -> None:
    for setting in ("auto", "on", "off"):
        choice = OverlapChoice(cast("Overlap", setting))
        assert not choice.is_split(1)
        assert not choice.is_split(0)
    assert OverlapChoice("on").is_split(2)
    assert not OverlapChoice("off").is_split(2)


def test_sequences_that_come_and_go_end_a_trial() -> None:
    """Nothing is concluded from the few steps of it that there were."""
    devices = Devices(by_sequence(0.003 / 8), by_sequence(0.006 / 8))
    for turn in range(3000):
        devices.run((3, 4, 8)[turn % 3], 0.012)
    assert devices.stats.get(metrics.OVERLAP_TRIALS) > 3
    assert devices.run(8, 0.5) < 1.1 / 0.009
