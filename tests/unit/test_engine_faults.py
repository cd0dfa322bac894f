"""What goes wrong beside the engine: proposers that are late, doubled, lying, dead or out of numbers; full caches;
readers that leave. Scenarios B21 and B24, and the running requests of B23."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle2.protocol import GenerationRequest
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.transport.base import ProposerLink
from eagle2.transport.messages import DraftReply, DraftStep, DraftTree
from fakes.drafts import RandomHandler
from fakes.engines import INCARNATION, PROMPTS, EngineKit, draft_head, request
from fakes.links import DelayedLink, DuplicatingLink, DyingLink, ForeignLink, StaleLink

REQUESTS = [
    request(prompt, max_tokens=30, ignore_eos=True, temperature=float(i % 2), seed=i)
    for i, prompt in enumerate(PROMPTS[:4])
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [answer.ids for answer in EngineKit(None).answers(*REQUESTS)]


def ids_of(kit: EngineKit, requests: list[GenerationRequest] = REQUESTS) -> list[list[int]]:
    return [answer.ids for answer in kit.answers(*requests)]


LINKS: dict[str, Callable[[ProposerLink], ProposerLink]] = {
    "late by one receive": lambda link: DelayedLink(link, late=1),
    "late by several": lambda link: DelayedLink(link, late=4),
    "doubled": DuplicatingLink,
    "older replies again": StaleLink,
    "another incarnation": lambda link: ForeignLink(link, 99),
}


@pytest.mark.parametrize("name", LINKS)
def test_stale_replies_are_dropped_and_counted(name: str, expected: list[list[int]]) -> None:
    """B24: tokens stay right and no exception reaches a request, whatever the replies look like."""
    kit = EngineKit(draft_head(), wrap=LINKS[name], timeout_s=0.0 if "late" in name else 0.05)
    assert ids_of(kit) == expected
    assert kit.stats.get(metrics.STALE_REPLIES) > 0


class Corrupting:
    """Changes the trees of every reply."""

    def __init__(self, link: ProposerLink, change: Callable[[DraftTree], DraftTree]) -> None:
        self._link, self._change, self.incarnation = link, change, link.incarnation

    def send(self, step: DraftStep) -> None:
        self._link.send(step)

    def receive(self, timeout_s: float) -> DraftReply | None:
        reply = self._link.receive(timeout_s)
        if reply is None:
            return None
        trees = tuple(self._change(tree) for tree in reply.trees)
        values = {name: getattr(reply, name) for name in DraftReply.__slots__}
        return DraftReply(**{**values, "trees": trees})

    def close(self) -> None:
        self._link.close()


def changed(tree: DraftTree, **changes: Any) -> DraftTree:
    return DraftTree(**{**{name: getattr(tree, name) for name in DraftTree.__slots__}, **changes})


CORRUPTIONS: dict[str, Callable[[DraftTree], DraftTree]] = {
    "older cycle": lambda t: changed(t, cycle=t.cycle - 1),
    "another sequence": lambda t: changed(t, sequence=t.sequence + 1000),
    "token outside the vocabulary": lambda t: changed(t, tokens=t.tokens + 10**6),
    "negative token": lambda t: changed(t, tokens=-1 - t.tokens),
    "parent behind its child": lambda t: changed(t, parents=t.parents + 5),
    "parent of nobody": lambda t: changed(t, parents=t.parents - 7),
    "scores that are no numbers": lambda t: changed(t, scores=t.scores * float("nan")),
    "fewer parents than tokens": lambda t: changed(t, parents=t.parents[:-1]),
    "too few rows held": lambda t: changed(t, held=max(t.held - 3, 0)),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_proposer_that_lies_costs_only_speed(name: str, expected: list[list[int]]) -> None:
    kit = EngineKit(draft_head(), wrap=lambda link: Corrupting(link, CORRUPTIONS[name]))
    assert ids_of(kit) == expected


def test_replies_of_depth_0_then_5(expected: list[list[int]]) -> None:
    """B24: a tree of the root alone, then a deep one."""
    count = iter(range(10**6))

    def every_other(tree: DraftTree) -> DraftTree:
        if next(count) % 2:
            return tree
        return changed(tree, tokens=tree.tokens[:0], parents=tree.parents[:0], scores=tree.scores[:0])

    kit = EngineKit(draft_head(), wrap=lambda link: Corrupting(link, every_other), shape=TreeShape(5, 3, 10))
    assert ids_of(kit) == expected


@pytest.mark.parametrize("at_send", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_proposer_that_dies_and_comes_back(steps: int, at_send: bool, expected: list[list[int]]) -> None:
    """Streams go on by plain decoding; drafting resumes when a proposer is back, for running sequences too."""
    kit = EngineKit(draft_head(), wrap=lambda link: DyingLink(link, steps, at_send=at_send))
    answers = [kit.submit(one) for one in REQUESTS]
    while kit.pair.is_up:
        kit.engine.step()
    kit.wrap = lambda link: link
    before = kit.stats.get(metrics.NUM_DRAFTS)
    for _ in range(3):
        kit.engine.step()
    kit.wait_for_pair()
    kit.run()
    assert [answer.ids for answer in answers] == expected
    assert kit.stats.get(metrics.NUM_DRAFTS) > before, "drafting has resumed"
    assert kit.stats.get(metrics.PAIRINGS) >= 2
    kit.check_idle()


def test_a_proposer_that_stays_away(expected: list[list[int]]) -> None:
    kit = EngineKit(draft_head(), wrap=lambda link: DyingLink(link, 2))
    kit.proposer_is_there = True
    answers = [kit.submit(one) for one in REQUESTS]
    kit.engine.step()
    kit.proposer_is_there = False
    kit.run()
    assert [answer.ids for answer in answers] == expected
    assert kit.stats.get(metrics.PROPOSER_UP) == 0
    assert kit.stats.get(metrics.FALLBACK_SECONDS) > 0


def test_a_hung_proposer_is_given_up(expected: list[list[int]]) -> None:
    """It owes an answer for longer than allowed: a new one is looked for, and the streams never waited for it."""

    class Silent:
        incarnation = INCARNATION
        closed = False

        def send(self, step: DraftStep) -> None: ...

        def receive(self, timeout_s: float) -> None:
            return None

        def close(self) -> None:
            self.closed = True

    kit = EngineKit(draft_head(), wrap=lambda _: Silent(), timeout_s=0.0, hang_s=0.0)
    answers = [kit.submit(one) for one in REQUESTS]
    for _ in range(3):
        kit.engine.step()
        time.sleep(0.002)
    assert kit.links[0].closed  # type: ignore[attr-defined]
    kit.wrap = lambda link: link
    kit.run()
    assert [answer.ids for answer in answers] == expected


def test_nan_in_one_sequence_stays_there() -> None:
    """B21: a feature that is no number: that sequence decodes plainly in this cycle, the other three are unaffected."""
    expected = [answer.ids for answer in EngineKit(draft_head()).answers(*REQUESTS)]
    counts = [answer.usage for answer in EngineKit(draft_head()).answers(*REQUESTS)]
    kit = EngineKit(draft_head())
    answers = [kit.submit(one) for one in REQUESTS]
    while any(len(answer.ids) < 5 for answer in answers):
        kit.engine.step()
    victim = kit.engine.scheduler.running[1]
    slots = torch.from_numpy(victim.table.slots[-3:].astype("int64"))
    sound = kit.target._features[slots].clone()
    kit.target._features[slots] = torch.tensor(float("nan"))
    drafted = victim.num_drafted
    kit.engine.step()
    assert victim.num_drafted == drafted, "no tree in this cycle"
    assert kit.stats.get(metrics.NON_FINITE_DRAFTS) == 1
    kit.target._features[slots] = sound
    kit.run()
    assert [answer.ids for answer in answers] == expected
    for i in (0, 2, 3):
        assert answers[i].usage == counts[i]
    kit.check_idle()


def test_logits_that_are_no_numbers_end_only_that_request(expected: list[list[int]]) -> None:
    kit = EngineKit(None)
    logits = kit.target.logits
    broken = 2
    kit.target.logits = lambda *rows: _with_nan_row(logits(*rows), broken)  # type: ignore[method-assign]
    kit.target.best_of = lambda *rows: kit.target.best(kit.target.logits(*rows))  # type: ignore[method-assign]
    answers = [kit.submit(one) for one in REQUESTS]
    kit.run()
    assert answers[broken].finish_reason == "error"
    assert "not a number" in (answers[broken].commits[-1].error or "")
    assert [a.ids for i, a in enumerate(answers) if i != broken] == [e for i, e in enumerate(expected) if i != broken]
    kit.check_idle()


def _with_nan_row(logits: torch.Tensor, row: int) -> torch.Tensor:
    logits = logits.clone()
    if logits.shape[0] == len(REQUESTS):
        logits[row] = float("nan")
    return logits


def test_features_beyond_what_the_head_was_trained_for(expected: list[list[int]]) -> None:
    """Past its longest position a request decodes plainly; others keep drafting."""
    handler = draft_head()
    kit = EngineKit(handler)
    object.__setattr__(handler.model.config, "max_position_embeddings", 30)
    try:
        assert ids_of(kit) == expected
    finally:
        object.__setattr__(handler.model.config, "max_position_embeddings", 512)


@pytest.mark.parametrize("slots", [70, 90, 140])
def test_preemption_is_invisible(slots: int) -> None:
    """B24: a pool that cannot hold all; the newest are put back and come out token for token the same."""
    requests = [request(PROMPTS[i % 3], max_tokens=30, ignore_eos=True, temperature=0.8, seed=i) for i in range(5)]
    alone = [EngineKit(None).answer(one).ids for one in requests]
    kit = EngineKit(draft_head(), num_slots=slots, max_model_len=slots, prefill_chunk=16)
    # Admission is by prompt length; what makes the pool too small comes later.
    assert ids_of(kit, requests) == alone
    if slots < 140:
        assert kit.stats.get(metrics.NUM_PREEMPTIONS) > 0


def test_preemption_and_cancel_while_the_proposer_is_late(expected: list[list[int]]) -> None:
    """B24: while replies are late, one request is cancelled and another preempted; the third goes on."""
    kit = EngineKit(draft_head(), wrap=lambda link: DelayedLink(link, late=3), timeout_s=0.0)
    submitted = [kit.submit(one) for one in REQUESTS[:3]]
    for _ in range(4):
        kit.engine.step()
    kit.engine.cancel(kit.engine.scheduler.running[0])
    kit.engine.departures.preempt()
    kit.run()
    assert submitted[0].finish_reason is None, "nobody reads a cancelled stream"
    assert [answer.ids for answer in submitted[1:]] == expected[1:3]
    for _ in range(8):
        kit.engine.step()
    kit.engine.scheduler.check_integrity()
    assert kit.target.pool.num_used == 0


def test_a_small_proposer_drafts_for_whom_it_can(expected: list[list[int]]) -> None:
    for slots in (8, 60, 120):
        assert ids_of(EngineKit(draft_head(num_slots=slots))) == expected


def test_a_cancelled_request_ends_within_two_steps() -> None:
    """B23: decoding stops, slots are free on both sides, nothing more is asked of the proposer; queued ones too."""
    handler = RandomHandler(3, 258, incarnation=INCARNATION)
    kit = EngineKit(handler, max_sequences=3)
    one = request(PROMPTS[0], max_tokens=400, ignore_eos=True)
    sequences = [kit.engine.submit(one, lambda _: None) for _ in range(6)]
    for _ in range(4):
        kit.engine.step()
    assert kit.stats.get(metrics.NUM_REQUESTS_RUNNING) == 3
    assert kit.stats.get(metrics.NUM_REQUESTS_WAITING) == 3
    for sequence in sequences:
        kit.engine.cancel(sequence)
    asked = len([e for step in handler.steps for e in step.entries])
    kit.engine.step()
    kit.engine.step()
    assert kit.stats.get(metrics.NUM_REQUESTS_RUNNING) == kit.stats.get(metrics.NUM_REQUESTS_WAITING) == 0
    assert kit.stats.get(metrics.KV_SLOTS_USED, side="target") == 0
    assert kit.stats.get(metrics.KV_SLOTS_USED, side="draft") == 0
    assert len([e for step in handler.steps for e in step.entries]) == asked
    assert all(handler.held(sequence.id) == 0 for sequence in sequences)
    assert kit.stats.get(metrics.NUM_REQUESTS_ABORTED) == 6
    assert len(sequences[5].tokens) == len(one.prompt_ids), "a queued request never started"


def test_a_normal_end_is_no_abort() -> None:
    kit = EngineKit(draft_head())
    answers = kit.answers(*REQUESTS)
    assert all(answer.finish_reason == "length" for answer in answers)
    for sequence in [kit.engine.submit(one, lambda _: None) for one in REQUESTS]:
        kit.run()
        kit.engine.cancel(sequence)  # what closing a finished stream does
    kit.run()
    assert kit.stats.get(metrics.NUM_REQUESTS_ABORTED) == 0


def test_a_deadline_ends_a_request_with_an_error() -> None:
    kit = EngineKit(draft_head())
    late = kit.submit(request(PROMPTS[0], max_tokens=50, deadline=time.time() - 1))
    good = kit.submit(request(PROMPTS[0], max_tokens=5, ignore_eos=True, deadline=time.time() + 600))
    kit.run()
    assert late.finish_reason == "error"
    assert "deadline" in (late.commits[-1].error or "")
    assert len(good.ids) == 5
    kit.check_idle()


def test_low_acceptance_is_shown() -> None:
    """B20: a drafter that never helps raises a warning metric after 100 trees; a good one does not."""
    kit = EngineKit(RandomHandler(1, 258, incarnation=INCARNATION), shape=TreeShape(1, 1, 2))
    one = request(PROMPTS[0], max_tokens=120, ignore_eos=True)
    kit.answer(one)
    assert kit.stats.get(metrics.LOW_ACCEPTANCE) == 1
    good = EngineKit(draft_head())
    good.answer(one)
    good.answer(one)
    assert good.stats.get(metrics.LOW_ACCEPTANCE) == 0
    assert good.stats.get(metrics.MEAN_ACCEPTANCE_LENGTH) > 1.5
