"""What a proposer is sent: rows that it lacks, once, and not those that it has kept of an earlier text.

Answers, cycles and accepted drafts must be those of a pair that keeps nothing.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle2.engine import briefing
from eagle2.protocol import GenerationRequest
from eagle2.telemetry import metrics
from eagle2.transport.base import ProposerLink
from eagle2.transport.messages import DraftStep
from eagle2.transport.node import NodeLink
from eagle2.transport.server import NodeServer
from fakes.engines import INCARNATION, PROMPTS, Answer, EngineKit, draft_head, prompt_ids, request
from fakes.links import DelayedLink, DuplicatingLink, DyingLink, StaleLink, WrappedLink

SYSTEM = "the grey keeper of the harbour answers briefly, in plain words, and never speaks of the weather. " * 2
DTYPES = [torch.float32, torch.bfloat16]


class Recorded(WrappedLink):
    """Keeps the steps that are sent."""

    def __init__(self, inner: ProposerLink) -> None:
        super().__init__(inner)
        self.steps: list[DraftStep] = []

    def send(self, step: DraftStep) -> None:
        self.steps.append(step)
        super().send(step)


class RecordedKit(EngineKit):
    """An engine whose links record."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, prefix_cache: bool = True, **values: object) -> None:
        self.recorded: list[Recorded] = []
        super().__init__(
            draft_head(dtype=dtype, prefix_cache=prefix_cache),
            dtype=dtype,
            prefix_cache=prefix_cache,
            wrap=self._record,
            **values,  # type: ignore[arg-type]
        )

    def _record(self, link: ProposerLink) -> ProposerLink:
        self.recorded.append(Recorded(link))
        return self.recorded[-1]

    @property
    def questions(self) -> list[DraftStep]:
        """Steps that ask for anything; others only free what has ended."""
        return [step for link in self.recorded for step in link.steps if step.entries]

    @property
    def sent(self) -> int:
        assert self.stats.get(metrics.DRAFT_ROWS_SENT) == sum(
            len(entry.tokens) for step in self.questions for entry in step.entries
        )
        return int(self.stats.get(metrics.DRAFT_ROWS_SENT))

    @property
    def found(self) -> int:
        return int(self.stats.get(metrics.DRAFT_ROWS_FOUND))


def outcome(answer: Answer) -> tuple[list[int], str, str | None, object]:
    return answer.ids, answer.text, answer.finish_reason, replace(answer.usage, cached_tokens=0)


def cold(asked: GenerationRequest, dtype: torch.dtype = torch.float32) -> tuple[Answer, RecordedKit]:
    kit = RecordedKit(dtype=dtype, prefix_cache=False)
    return kit.answer(asked), kit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_second_turn_sends_its_new_rows_alone(dtype: torch.dtype) -> None:
    """The longest that an answer can be behind at its end are the tokens of its last two cycles."""
    kit = RecordedKit(dtype=dtype)
    first = request(SYSTEM, max_tokens=24, ignore_eos=True)
    answer = kit.answer(first)
    assert outcome(answer) == outcome(cold(first, dtype)[0])
    assert kit.found == 0
    before, steps = kit.sent, len(kit.questions)
    line = b" and then? "
    second = request([*first.prompt_ids, *answer.ids, *line], max_tokens=24, ignore_eos=True)
    turn = kit.answer(second)
    expected, fresh = cold(second, dtype)
    assert outcome(turn) == outcome(expected)
    history = len(first.prompt_ids) + len(answer.ids)
    assert history - 2 * 5 <= kit.found < history
    assert fresh.sent - (kit.sent - before) == kit.found, "what was found was not sent"
    asking = kit.questions[steps:]
    assert [entry.only_asks for step in asking for entry in step.entries].count(True) == 1
    assert asking[0].entries[0].only_asks
    assert len(asking) <= len(fresh.questions) + 1
    assert kit.stats.get(metrics.KV_SLOTS_CACHED, side="draft") > history


def test_a_first_turn_costs_no_exchange_more() -> None:
    """Its first rows say whose they are; nothing is asked."""
    for prompt in PROMPTS:
        kit, asked = RecordedKit(), request(prompt, max_tokens=12, ignore_eos=True)
        answer = kit.answer(asked)
        expected, fresh = cold(asked)
        assert outcome(answer) == outcome(expected)
        assert (len(kit.questions), kit.sent) == (len(fresh.questions), fresh.sent)
        opened = [entry.opening is not None for step in kit.questions for entry in step.entries]
        assert opened == [True] + [False] * (len(opened) - 1)
        assert not any(entry.opening for step in fresh.questions for entry in step.entries)


def test_a_prompt_that_several_begin_with_is_sent_once() -> None:
    """Eight at once: one sends the system prompt, part by part, and the others find it while they wait."""
    asked = [request(f"{SYSTEM}{i} go on", max_tokens=12, ignore_eos=True, seed=i) for i in range(8)]
    expected = [cold(one) for one in asked]
    kit = RecordedKit(max_sequences=8, prefill_chunk=64)
    assert [outcome(answer) for answer in kit.answers(*asked)] == [outcome(answer) for answer, _ in expected]
    shared = len(prompt_ids(SYSTEM))
    saved = sum(fresh.sent for _, fresh in expected) - kit.sent
    assert saved == kit.found
    assert 7 * (shared - 16) <= saved <= 7 * (shared + 8)


def test_the_same_prompt_again_sends_one_row_and_its_answer() -> None:
    kit, asked = RecordedKit(), request(SYSTEM, max_tokens=12, ignore_eos=True)
    first = kit.answer(asked)
    sent = kit.sent
    assert outcome(kit.answer(asked)) == outcome(first)
    rows = len(asked.prompt_ids)
    assert kit.found >= rows - 1
    assert kit.sent - sent < 12 + first.usage.cycles


def test_tenants_are_sent_everything_of_their_own() -> None:
    kit = RecordedKit()
    asked = [request(SYSTEM, max_tokens=8, tenant=tenant) for tenant in ("one", "two", "one")]
    kit.answer(asked[0])
    sent = kit.sent
    kit.answer(asked[1])
    assert (kit.sent, kit.found) == (2 * sent, 0)
    kit.answer(asked[2])
    assert kit.found >= len(asked[2].prompt_ids) - 1


def test_what_was_put_back_is_not_sent_again() -> None:
    """It decodes at once when it is back, and the proposer has kept all its rows."""
    asked = [request(PROMPTS[0], max_tokens=30, ignore_eos=True), request(SYSTEM, max_tokens=30, ignore_eos=True)]
    expected = [cold(one) for one in asked]
    kit = RecordedKit()
    answers = [kit.submit(one) for one in asked]
    for _ in range(8):
        kit.engine.step()
    kit.engine.departures.preempt()
    kit.run()
    kit.check_idle()
    assert [answer.ids for answer in answers] == [answer.ids for answer, _ in expected]
    assert kit.sent <= sum(fresh.sent for _, fresh in expected) + 2 * len(prompt_ids(SYSTEM))


@pytest.mark.parametrize("kept", [True, False])
def test_a_stream_that_is_continued_is_guessed_to_be_held(monkeypatch: pytest.MonkeyPatch, *, kept: bool) -> None:
    """It decodes at once and is too long for one step: its newest rows alone are sent, or else all, one step later."""
    monkeypatch.setattr(briefing, "_SYNC_ROWS", 64)
    monkeypatch.setattr(briefing, "_NEWEST_ROWS", 16)
    kit = RecordedKit()
    whole_request = request(SYSTEM, max_tokens=40, ignore_eos=True)
    whole = kit.answer(whole_request)
    if not kept:
        kit.handler.reset()  # type: ignore[union-attr]
    steps, found = len(kit.questions), kit.found
    rest = kit.answer(request(SYSTEM, max_tokens=40, ignore_eos=True, output_ids=whole.ids[:20]))
    assert whole.ids[:20] + rest.ids == whole.ids
    first = kit.questions[steps].entries[0]
    assert (len(first.tokens), first.draft) == (16, True)
    if kept:
        assert kit.found - found == first.base
        assert rest.usage.accepted_prediction_tokens > 0
        assert all(len(entry.tokens) < 8 for step in kit.questions[steps + 1 :] for entry in step.entries)
    else:
        assert kit.found == found
        assert [len(step.entries[0].tokens) for step in kit.questions[steps + 1 : steps + 4]] == [64, 64, 64]


def test_a_new_proposer_is_told_from_the_beginning() -> None:
    """B24: another lease holds nothing, whatever the last one held."""
    kit = RecordedKit()
    kit.wrap = lambda link: DyingLink(kit._record(link), 6)
    kit.recorded[0].close()
    asked = request(SYSTEM, max_tokens=40, ignore_eos=True)
    answer = kit.submit(asked)
    for _ in range(400):
        if not kit.engine.step() and answer.finish_reason:
            break
        if not kit.pair.is_up:
            kit.wait_for_pair()
    assert answer.ids == cold(asked)[0].ids
    assert len(kit.recorded) > 2
    openings = [[e.opening is not None for step in link.steps for e in step.entries] for link in kit.recorded[1:]]
    assert all(opened[0] and not any(opened[1:]) for opened in openings if opened)
    assert kit.found == 0


@pytest.mark.parametrize("link", [DelayedLink, DuplicatingLink, StaleLink], ids=lambda link: link.__name__)
def test_late_and_doubled_answers_change_no_text(link: type[WrappedLink]) -> None:
    """An opening whose answer was lost is told again."""
    kit = EngineKit(draft_head(), wrap=link, timeout_s=0.0)
    history = list(prompt_ids(SYSTEM))
    for line in ("who? ", "and then? ", "why? "):
        history += line.encode()
        asked = request(history, max_tokens=16, ignore_eos=True)
        answer = kit.answer(asked)
        assert answer.ids == cold(asked)[0].ids
        history += answer.ids


def test_turns_over_a_socket() -> None:
    """Openings, answers and counts as they are within one process."""
    handler = draft_head()
    with tempfile.TemporaryDirectory(prefix="e2") as folder:
        server = NodeServer(Path(folder) / "p.sock", handler, INCARNATION, fingerprint="m")

        def connect(_: ProposerLink) -> ProposerLink:
            return NodeLink.connect(server.path, verifier_incarnation=1, fingerprint="m", timeout_s=10)

        kit = EngineKit(handler, wrap=connect)
        history = list(prompt_ids(SYSTEM))
        for line in ("who? ", "and then? "):
            before = kit.stats.get(metrics.DRAFT_ROWS_FOUND)
            known = len(history)
            history += line.encode()
            asked = request(history, max_tokens=16, ignore_eos=True)
            answer = kit.answer(asked)
            assert outcome(answer) == outcome(cold(asked)[0])
            history += answer.ids
        assert known - 10 <= kit.stats.get(metrics.DRAFT_ROWS_FOUND) - before < known
        kit.engine.stop()
        server.close()


def test_a_drafter_short_of_slots_forgets_before_it_refuses() -> None:
    """Its pool holds one text and a beam; what it has kept makes room each time."""
    kit = EngineKit(draft_head(num_slots=len(prompt_ids(SYSTEM)) + 60))
    for number in range(4):
        asked = request(f"{number} {SYSTEM}", max_tokens=16, ignore_eos=True)
        answer = kit.answer(asked)
        assert outcome(answer) == outcome(cold(asked)[0])
        assert answer.usage.accepted_prediction_tokens > 0
