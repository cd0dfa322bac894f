"""Requests that begin alike: what is read again, what is not, and that nobody can tell from the tokens.

Scenarios B06 (the turn after an end inside a block), B39 (tenants), B02 (a used engine is as good as a fresh one).
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from eagle2.engine.draft import DraftRunner
from eagle2.protocol import GenerationRequest
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from fakes.drafts import OracleHandler
from fakes.engines import EOS, INCARNATION, PROMPTS, Answer, EngineKit, draft_head, plain, prompt_ids, request
from fakes.links import DyingLink

SYSTEM = "the grey keeper of the harbour answers briefly, in plain words, and never speaks of the weather. " * 2
LINES = ("who buys the red mirror? ", "and then? ", "why does the queen follow ", "the old sailor ")
SAMPLING = [{}, {"temperature": 1.0, "seed": 42}, {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.8}]
DTYPES = [torch.float32, torch.bfloat16]


def outcome(answer: Answer) -> tuple[list[int], str, str | None]:
    return answer.ids, answer.text, answer.finish_reason


def cold(asked: GenerationRequest, *, drafts: bool = False, dtype: torch.dtype = torch.float32) -> Answer:
    """A fresh engine's answer, which keeps nothing."""
    kit = EngineKit(draft_head(dtype=dtype) if drafts else None, dtype=dtype, prefix_cache=False)
    answer = kit.answer(asked)
    assert answer.usage.cached_tokens == 0
    assert kit.target.pool.num_free == kit.target.pool.num_slots
    return answer


def prefilled(kit: EngineKit) -> int:
    return int(kit.stats.get(metrics.PREFILL_TOKENS))


def indexed(kit: EngineKit, asked: GenerationRequest, tokens: list[int]) -> int:
    """How many of a text's tokens the index knows."""
    index = kit.engine._reuse._index
    assert index is not None
    return len(index.match(asked.tenant, np.array(tokens, dtype=np.int64)))


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_every_turn_of_a_chat_reads_only_its_new_line(
    sampling: dict[str, object], dtype: torch.dtype, drafts: bool
) -> None:
    """Tokens, text, cycles and accepted drafts are those of a fresh engine that reads everything."""
    kit = EngineKit(draft_head(dtype=dtype) if drafts else None, dtype=dtype)
    history = list(prompt_ids(SYSTEM))
    for turn, line in enumerate(LINES):
        known, before = len(history), prefilled(kit)
        history += line.encode()
        asked = request(history, max_tokens=20, ignore_eos=turn % 2 == 0, **sampling)
        warm, fresh = kit.answer(asked), cold(asked, drafts=drafts, dtype=dtype)
        assert outcome(warm) == outcome(fresh)
        assert replace(warm.usage, cached_tokens=0) == fresh.usage, "the drafter has lost nothing either"
        # Of an answer all has been computed, mostly but its last token; of a prompt the last is computed again.
        assert warm.usage.cached_tokens in ((known - 1, known) if turn else (0,))
        assert prefilled(kit) - before == len(history) - warm.usage.cached_tokens
        history += warm.ids
    assert kit.stats.get(metrics.PREFIX_CACHE_HITS) == kit.stats.get(metrics.CACHED_PROMPT_TOKENS) > 0
    assert kit.stats.get(metrics.PREFIX_CACHE_QUERIES) > kit.stats.get(metrics.PREFIX_CACHE_HITS)


@pytest.mark.parametrize("sampling", SAMPLING[:2], ids=str)
def test_the_same_request_again_reads_one_token(sampling: dict[str, object]) -> None:
    """Its last one, whose logits are needed."""
    kit = EngineKit(draft_head())
    for prompt in (SYSTEM, "a", ""):
        asked = request(prompt, max_tokens=12, **sampling)
        first, before = kit.answer(asked), prefilled(kit)
        again, off = kit.answer(asked), kit.answer(plain(asked))
        assert outcome(first) == outcome(again) == outcome(off) == outcome(cold(asked))
        assert again.usage.cached_tokens == off.usage.cached_tokens == len(asked.prompt_ids) - 1
        assert prefilled(kit) - before == 2


def test_eight_sessions_share_a_system_prompt() -> None:
    """Asked one after the other or all at once: what they share is read once."""
    asked = [request(f"{SYSTEM}{i} {line}", max_tokens=16, seed=i) for i, line in enumerate(2 * LINES)]
    shared, own = len(prompt_ids(SYSTEM)), sum(len(one.prompt_ids) for one in asked) - 8 * len(prompt_ids(SYSTEM))
    expected = [outcome(cold(one)) for one in asked]

    kit = EngineKit(draft_head())
    answers = [kit.answer(one) for one in asked]
    assert [outcome(answer) for answer in answers] == expected
    assert [answer.usage.cached_tokens for answer in answers] == [0, *[shared] * 7]
    assert prefilled(kit) == shared + own

    kit = EngineKit(draft_head(), max_sequences=8, prefill_chunk=64)
    answers = kit.answers(*asked)
    assert [outcome(answer) for answer in answers] == expected
    assert prefilled(kit) + sum(answer.usage.cached_tokens for answer in answers) == 8 * shared + own
    assert prefilled(kit) <= shared + own + 7 * 15, "at the border a few tokens are not worth a step's wait"

    kit = EngineKit(draft_head(), prefix_cache=False)
    assert [outcome(answer) for answer in kit.answers(*asked)] == expected
    assert prefilled(kit) == 8 * shared + own


def test_short_common_beginnings_hold_nobody_up() -> None:
    """Two prompts that share less than half of what a step can take are read side by side."""
    kit = EngineKit(None, prefill_chunk=400)
    kit.submit(request(SYSTEM[:40] + "x" * 100, max_tokens=4))
    kit.submit(request(SYSTEM[:40] + "y" * 100, max_tokens=4))
    kit.engine.step()
    assert prefilled(kit) == 2 * 141


def test_tenants_share_nothing() -> None:
    """B39: the same prompt of another tenant is cold, whatever the names look like; one's own is warm."""
    kit = EngineKit(draft_head())
    asked = {
        tenant: request(SYSTEM, max_tokens=8, tenant=tenant)
        for tenant in ("org_1", "org_12345", "", "anonymous", "org_1\0")
    }
    expected = outcome(cold(asked["org_1"]))
    for one in asked.values():
        before = prefilled(kit)
        answer = kit.answer(one)
        assert answer.usage.cached_tokens == 0
        assert prefilled(kit) - before == len(one.prompt_ids)
        assert outcome(answer) == expected
    for one in asked.values():
        assert kit.answer(one).usage.cached_tokens == len(one.prompt_ids) - 1
    # At once as well: nobody waits for what a stranger reads.
    kit = EngineKit(None)
    together = kit.answers(*asked.values())
    assert [answer.usage.cached_tokens for answer in together] == [0] * len(asked)


@pytest.mark.parametrize("place", [1, 2, 3, 5, 7, 9])
def test_an_end_inside_a_block_and_the_next_turn(place: int) -> None:
    """B06: an oracle drafts six tokens, the end token falls among them; nothing behind it can be found."""
    whole = cold(request(PROMPTS[2], max_tokens=40, ignore_eos=True))
    start = len(prompt_ids(PROMPTS[2]))
    place = next(i for i in range(place, 40) if whole.ids.index(whole.ids[i]) == i)
    handler = OracleHandler(lambda context: whole.ids[len(context) - start :], incarnation=INCARNATION)
    kit = EngineKit(handler, shape=TreeShape(6, 1, 7))
    first = request(PROMPTS[2], max_tokens=40, ignore_eos=True, stop_token_ids=[whole.ids[place]])
    answer = kit.answer(first)
    assert answer.ids == whole.ids[: place + 1]
    visible = [*first.prompt_ids, *answer.ids]
    assert len(visible) - 1 <= indexed(kit, first, [*first.prompt_ids, *whole.ids]) <= len(visible)

    line, before = b" and then ", prefilled(kit)
    second = request([*visible, *line], max_tokens=20)
    turn = kit.answer(second)
    assert len(visible) - 1 <= turn.usage.cached_tokens <= len(visible)
    assert len(line) <= prefilled(kit) - before <= len(line) + 1
    assert outcome(turn) == outcome(cold(second))


def test_a_stop_string_and_the_next_turn() -> None:
    """B06 for text: ids stay up to the token that completed the stop string."""
    kit = EngineKit(draft_head(), shape=TreeShape(6, 4, 24))
    whole = cold(request(PROMPTS[2], max_tokens=40, ignore_eos=True))
    asked = request(PROMPTS[2], max_tokens=40, ignore_eos=True, stop=[whole.text[9:12]])
    answer = kit.answer(asked)
    visible = [*asked.prompt_ids, *answer.ids]
    assert indexed(kit, asked, [*asked.prompt_ids, *whole.ids]) <= len(visible) < len(asked.prompt_ids) + 40
    second = request([*visible, *b" so "], max_tokens=12)
    assert outcome(kit.answer(second)) == outcome(cold(second))


def test_short_of_slots_the_oldest_go_and_nobody_is_put_back() -> None:
    """A pool of two contexts, ten texts one after the other: all are answered as if they were alone."""
    kit = EngineKit(draft_head(), num_slots=160, max_model_len=80, max_sequences=1)
    asked = [
        request(f"{i} {PROMPTS[i % 4]}", max_tokens=30, ignore_eos=True, temperature=0.8, seed=i) for i in range(10)
    ]
    for one in asked:
        answer = kit.submit(one)
        while kit.engine.step():
            kit.engine.scheduler.check_integrity()
        assert outcome(answer) == outcome(cold(one))
        kit.check_idle()
    assert kit.stats.get(metrics.PREFIX_CACHE_EVICTIONS) > 200
    assert kit.stats.get(metrics.NUM_PREEMPTIONS) == 0
    assert kit.stats.get(metrics.KV_SLOTS_CACHED, side="target") > 80, "what is not needed is kept"
    assert kit.answer(asked[9]).usage.cached_tokens == len(asked[9].prompt_ids) - 1
    assert kit.answer(asked[0]).usage.cached_tokens < 3, "long gone"


def test_a_cached_prefix_makes_room_for_admission() -> None:
    """Slots that only the index holds count as free, and those of a prefix in use need not be there twice."""
    kit = EngineKit(None, num_slots=420, prefill_chunk=256)
    shared = len(prompt_ids(SYSTEM))
    assert 2 * shared < 420 < 3 * shared
    kit.answer(request(SYSTEM, max_tokens=2))
    asked = [request(f"{SYSTEM}{i}", max_tokens=20, ignore_eos=True, seed=i) for i in range(4)]
    for one in asked:
        kit.submit(one)
    kit.engine.step()
    assert len(kit.engine.scheduler.running) == 4
    kit.run()
    kit.check_idle()
    assert kit.stats.get(metrics.NUM_PREEMPTIONS) == 0
    stranger = request("z" * 350, max_tokens=4)
    assert outcome(kit.answer(stranger)) == outcome(cold(stranger))


@pytest.mark.parametrize("seed", range(6))
def test_cancelled_put_back_and_crowded(seed: int) -> None:
    """Chats of two tenants in a small pool; some are cancelled, some put back at random moments, a proposer dies."""
    chance = random.Random(seed)
    handler = draft_head(num_slots=chance.choice([80, 400]))
    kit = EngineKit(
        handler,
        num_slots=chance.choice([130, 200]),
        max_model_len=125,
        max_sequences=4,
        prefill_chunk=chance.choice([7, 32]),
        wrap=lambda link: DyingLink(link, 9),
    )
    asked = [
        request(
            [*prompt_ids(SYSTEM[: chance.choice([10, 40, 60])]), *f"{i % 3} {LINES[i % 4]}".encode()][:80],
            max_tokens=chance.randint(1, 30),
            ignore_eos=True,
            tenant=chance.choice(["one", "two"]),
            temperature=chance.choice([0.0, 1.0]),
            seed=i % 4,
            speculation=chance.random() < 0.8,
        )
        for i in range(16)
    ]
    sequences, answers, cancelled = [], [], set()
    for one in asked:
        answers.append(Answer())
        sequences.append(kit.engine.submit(one, answers[-1].commits.append))
        for _ in range(chance.randint(0, 6)):
            kit.engine.step()
            kit.engine.scheduler.check_integrity()
            if chance.random() < 0.1:
                kit.engine.departures.preempt()
                kit.engine.scheduler.check_integrity()
        if chance.random() < 0.2:
            victim = chance.randrange(len(sequences))
            if sequences[victim].finish_reason is None:
                kit.engine.cancel(sequences[victim])
                cancelled.add(victim)
    for _ in range(5000):
        if not kit.engine.step():
            break
        kit.engine.scheduler.check_integrity()
    kit.check_idle()
    for i, (one, answer) in enumerate(zip(asked, answers, strict=True)):
        expected = cold(plain(one)).ids
        assert answer.ids == (expected[: len(answer.ids)] if i in cancelled else expected), i
        if i not in cancelled:
            assert 0 <= answer.usage.cached_tokens < len(one.prompt_ids)
    assert kit.stats.get(metrics.PREFIX_CACHE_EVICTIONS) > 0
    assert kit.stats.get(metrics.CACHED_PROMPT_TOKENS) > 0


def test_what_was_put_back_finds_its_own_again() -> None:
    """A preempted sequence reads again only what was taken meanwhile, and its own tokens are no hit of its prompt."""
    kit = EngineKit(draft_head())
    first, second = request(PROMPTS[0], max_tokens=30, ignore_eos=True), request(SYSTEM, max_tokens=30, ignore_eos=True)
    answers = [kit.submit(first), kit.submit(second)]
    for _ in range(6):
        kit.engine.step()
    before = prefilled(kit)
    assert before == len(first.prompt_ids) + len(second.prompt_ids)
    kit.engine.departures.preempt()
    kit.engine.scheduler.check_integrity()
    kit.run()
    assert prefilled(kit) == before
    assert [outcome(a) for a in answers] == [outcome(cold(first)), outcome(cold(second))]
    assert answers[1].usage.cached_tokens == 0


def test_another_verifier_goes_on_with_a_warm_prompt() -> None:
    """A stream that is continued here: prompt and sent tokens may be cached, the last one is the root."""
    kit = EngineKit(draft_head())
    one = request(SYSTEM, max_tokens=30, ignore_eos=True, temperature=0.9, seed=5)
    whole = kit.answer(one)
    before = prefilled(kit)
    again = request(one.prompt_ids, max_tokens=30, ignore_eos=True, temperature=0.9, seed=5, output_ids=whole.ids[:10])
    rest = kit.answer(again)
    assert whole.ids[:10] + rest.ids == whole.ids
    assert prefilled(kit) == before, "nothing to read: it decodes at once"
    assert rest.usage.cached_tokens == len(one.prompt_ids)


def test_a_proposer_that_came_later_is_sent_the_prefix() -> None:
    """Slots keep features: a drafter that never saw a cached prefix drafts as well as one that saw it read."""
    handler = draft_head()
    kit = EngineKit(handler, wrap=lambda link: DyingLink(link, 0))
    asked = request(SYSTEM, max_tokens=24, ignore_eos=True)
    expected = kit.answer(asked)
    assert expected.usage.accepted_prediction_tokens == 0
    kit.wrap = lambda link: link
    kit.wait_for_pair()
    warm, fresh = kit.answer(asked), cold(asked, drafts=True)
    assert warm.ids == expected.ids
    assert warm.usage.cached_tokens == len(asked.prompt_ids) - 1
    assert replace(warm.usage, cached_tokens=0) == fresh.usage
    assert warm.usage.accepted_prediction_tokens > 0
    assert isinstance(handler, DraftRunner)


def test_numbers_that_are_none_are_not_kept() -> None:
    """After a failed prompt nothing is found that could have been computed wrongly."""
    kit = EngineKit(None)
    asked = request(SYSTEM, max_tokens=8)
    expected = kit.answer(asked)
    best_of = kit.target.best_of
    kit.target.best_of = lambda *rows: torch.full_like(best_of(*rows), -1)  # type: ignore[method-assign]
    broken = kit.submit(request(SYSTEM + "x", max_tokens=8))
    kit.run()
    assert broken.finish_reason == "error"
    kit.check_idle()
    kit.target.best_of = best_of  # type: ignore[method-assign]
    again = kit.answer(asked)
    assert again.usage.cached_tokens == 0
    assert outcome(again) == outcome(expected)


def test_an_end_token_of_the_model_itself() -> None:
    """A visible end token is part of the history; what would have come behind it is not."""
    kit = EngineKit(draft_head())
    asked = request(PROMPTS[0], max_tokens=60, temperature=0.8)
    answer = kit.answer(asked)
    assert answer.ids[-1] == EOS
    second = request([*asked.prompt_ids, *answer.ids, *b" again "], max_tokens=12)
    turn = kit.answer(second)
    visible = len(asked.prompt_ids) + len(answer.ids)
    assert turn.usage.cached_tokens in (visible - 1, visible)
    assert outcome(turn) == outcome(cold(second))
