"""Classes, deadlines and the bound on the gap between tokens, in whole engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from eagle2.engine.target import TargetRunner
from eagle2.models.rows import Rows
from eagle2.protocol import GenerationRequest
from eagle2.telemetry import metrics
from fakes.engines import PROMPTS, Answer, EngineKit, draft_head, plain, request

SAMPLED = {"temperature": 0.9, "seed": 11, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1}


def batch(prompt: str, **how: object) -> GenerationRequest:
    return request(prompt, priority="batch", ignore_eos=True, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_batch_requests_that_make_way_say_what_they_would_have_said(prefix_cache: bool) -> None:
    """Preempted in the midst of their answers, greedy and sampled with penalties, drafted for and not."""
    asked = [
        batch(PROMPTS[0], max_tokens=40),
        batch(PROMPTS[1], max_tokens=40, **SAMPLED),
        plain(batch(PROMPTS[2], max_tokens=40, **SAMPLED)),
        batch(PROMPTS[7], max_tokens=24, **SAMPLED),
    ]
    urgent = [request(PROMPTS[3], max_tokens=6, ignore_eos=True, **SAMPLED) for _ in range(6)]  # type: ignore[arg-type]
    alone = [EngineKit(None).answer(plain(one)).ids for one in [*asked, *urgent]]
    kit = EngineKit(draft_head(), max_sequences=2, prefix_cache=prefix_cache)
    answers = [kit.submit(one) for one in asked]
    for one in urgent:
        for _ in range(3):
            kit.engine.step()
        answers.append(kit.submit(one))
    kit.run()
    kit.check_idle()
    assert [answer.ids for answer in answers] == alone
    assert kit.stats.get(metrics.NUM_PREEMPTIONS) >= 2
    assert [len(answer.ids) for answer in answers] == [answer.usage.completion_tokens for answer in answers]


def test_the_place_of_a_batch_request_is_had_at_the_next_step() -> None:
    kit = EngineKit(None, max_sequences=1)
    slow = kit.submit(batch(PROMPTS[0], max_tokens=60))
    for _ in range(5):
        kit.engine.step()
    written = len(slow.ids)
    urgent = kit.submit(request(PROMPTS[1], max_tokens=3, ignore_eos=True))
    kit.engine.step()
    assert len(urgent.ids) == 1
    kit.run()
    assert len(slow.ids) == 60 > written > 0
    kit.check_idle()


def test_slots_of_batch_requests_are_had_for_interactive_ones() -> None:
    """A pool that holds two of the three: the batch requests make way, one after the other if need be."""
    long = PROMPTS[7]
    kit = EngineKit(draft_head(), num_slots=640, max_sequences=4)
    alone = EngineKit(None).answer(plain(batch(long, max_tokens=50))).ids
    slow = [kit.submit(batch(long, max_tokens=50, tenant=str(i))) for i in range(2)]
    for _ in range(10):
        kit.engine.step()
    urgent = kit.submit(request(long, max_tokens=50, ignore_eos=True))
    kit.engine.step()
    first = kit.engine.scheduler.running[0]
    assert first.request.priority == "interactive"
    kit.run()
    kit.check_idle()
    assert [answer.ids for answer in (*slow, urgent)] == [alone] * 3


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_holds_in_the_queue_and_while_running() -> None:
    clock = Clock()
    kit = EngineKit(draft_head(), max_sequences=1, wall_clock=clock)
    running = kit.submit(request(PROMPTS[0], max_tokens=400, ignore_eos=True, deadline=1008.0))
    waiting = kit.submit(request(PROMPTS[1], max_tokens=5, ignore_eos=True, deadline=1004.5))
    patient = kit.submit(request(PROMPTS[2], max_tokens=5, ignore_eos=True, deadline=2000.0))
    for _ in range(9):
        kit.engine.step()
        clock.now += 1.0
    assert running.finish_reason is None
    assert waiting.finish_reason == "error", "it ends while it waits, not when its turn comes"
    kit.engine.step()
    assert running.finish_reason == "error"
    assert len(patient.ids) == 1, "the place is free for the step that finds the deadline passed"
    for late in (running, waiting):
        last = late.commits[-1]
        assert last.error_code == "deadline_exceeded"
        assert "deadline" in (last.error or "")
    assert len(running.ids) >= 8
    assert str(len(running.ids)) in (running.commits[-1].error or "")
    kit.run()
    kit.check_idle()
    assert len(patient.ids) == 5


def test_a_deadline_holds_while_a_prompt_is_read() -> None:
    clock = Clock()
    kit = EngineKit(None, prefill_chunk=16, wall_clock=clock)
    late = kit.submit(request(PROMPTS[7], max_tokens=5, deadline=1002.5))
    for _ in range(4):
        kit.engine.step()
        clock.now += 1.0
    assert late.finish_reason == "error"
    assert late.ids == []
    kit.check_idle()


class Device:
    """What a target's forward takes: the clock moves by ``step_s``, by ``row_s`` for a row and by ``pair_s`` for each
    token that a row attends to."""

    def __init__(self, target: TargetRunner, clock: Clock, step_s: float, row_s: float, pair_s: float) -> None:
        self._forward, self._clock = target.forward, clock
        self._step_s, self._row_s, self._pair_s = step_s, row_s, pair_s
        target.forward = self.forward  # type: ignore[method-assign]

    def forward(self, rows: Rows) -> Tensor:
        self._clock.now += self._step_s + self._row_s * len(rows.tokens) + self._pair_s * int(rows.lengths.sum())
        return self._forward(rows)


def read_beside_four(bound: float | None, *, speculation: bool) -> tuple[list[float], list[int], Answer]:
    """A prompt of 2,000 tokens arrives while four sequences decode, with 20 ms a step, 1 ms a row and 0.2 us a pair.

    Gaps between the tokens of those that decode and tokens of the prompt, by step while it was read; its answer.
    """
    clock = Clock()
    kit = EngineKit(
        draft_head() if speculation else None,
        max_model_len=4096,
        prefill_chunk=256,
        prefix_cache=False,
        max_token_gap_s=bound,
        clock=clock,
    )
    Device(kit.target, clock, 0.02, 1e-3, 2e-7)
    kit.answer(request([7] * 1500, max_tokens=20, ignore_eos=True))  # costs are learnt from whatever comes
    decoding = [kit.submit(request(prompt, max_tokens=600, ignore_eos=True)) for prompt in PROMPTS[:4]]
    for _ in range(10):
        kit.engine.step()
    long = kit.submit(request([i % 250 for i in range(2000)], max_tokens=1, ignore_eos=True))
    gaps, taken = [], []
    while not long.ids:
        before, read = clock.now, kit.stats.get(metrics.PREFILL_TOKENS)
        commits = [len(answer.commits) for answer in decoding]
        kit.engine.step()
        gaps.append(clock.now - before)
        taken.append(int(kit.stats.get(metrics.PREFILL_TOKENS) - read))
        assert [len(answer.commits) for answer in decoding] == [count + 1 for count in commits], "all get tokens"
    for sequence in kit.engine.scheduler.running:
        kit.engine.cancel(sequence)
    kit.run()
    kit.check_idle()
    return gaps, taken, long


@pytest.mark.parametrize("speculation", [True, False])
def test_a_long_prompt_makes_no_gap_above_the_bound(speculation: bool) -> None:
    bound, one_row = 0.2, 1e-3 + 2000 * 2e-7
    gaps, taken, answer = read_beside_four(bound, speculation=speculation)
    assert max(gaps) <= bound + one_row
    assert min(taken) > 0, "the prompt gets on at every step"
    assert sum(taken) == 2000
    assert len(gaps) < 40, "and uses what the bound leaves"
    free, chunks, same = read_beside_four(None, speculation=speculation)
    assert max(free) > 1.25 * bound, "without a bound there are longer gaps"
    assert chunks[0] == 256
    assert answer.ids == same.ids


def test_without_others_a_prompt_is_read_in_whole_chunks() -> None:
    clock = Clock()
    kit = EngineKit(None, max_model_len=4096, prefill_chunk=256, max_token_gap_s=0.001, clock=clock)
    Device(kit.target, clock, 0.02, 1e-3, 0.0)
    for seed in range(2):
        kit.submit(request([seed, *range(200), *range(200)], max_tokens=2, ignore_eos=True))
        read = []
        while kit.engine.step():
            read.append(kit.stats.get(metrics.PREFILL_TOKENS))
        assert read[0] - (0 if seed == 0 else 401) == 256


def test_answers_do_not_depend_on_the_bound() -> None:
    """Chunks of other sizes, the same bits: several requests at once, drafted for, with seeds."""
    asked = [request(prompt, max_tokens=30, ignore_eos=True, **SAMPLED) for prompt in PROMPTS]  # type: ignore[arg-type]
    answers = []
    for bound in (None, 0.05):
        clock = Clock()
        kit = EngineKit(draft_head(), max_token_gap_s=bound, clock=clock)
        Device(kit.target, clock, 0.02, 1e-3, 1e-6)
        got = []
        for one in asked:
            got.append(kit.submit(replace(one)))
            kit.engine.step()
        kit.run()
        kit.check_idle()
        answers.append([answer.ids for answer in got])
    assert answers[0] == answers[1]
