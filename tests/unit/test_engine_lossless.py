"""The same tokens with and without speculation, whatever the drafter, the batch, the cache or the dtype.

Scenarios B02 (greedy), B09 (seeds), B07 (penalties) at the engine; tests/integration has them over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from eagle2.protocol import GenerationRequest
from eagle2.speculative.draft import TreeShape
from eagle2.transport.base import DraftHandler
from fakes.drafts import OracleHandler, RandomHandler
from fakes.engines import INCARNATION, PROMPTS, Answer, EngineKit, draft_head, plain, prompt_ids, request
from golden_pair import GOLDEN

SAMPLING = [
    {},
    {"temperature": 1.0, "seed": 42},
    {"temperature": 0.7, "seed": 0, "top_p": 0.9},
    {"temperature": 1.5, "seed": 2**64 - 1, "top_k": 5, "min_p": 0.05},
    {"temperature": 0.0, "frequency_penalty": 1.2, "presence_penalty": -0.5},
    {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "logit_bias": ((101, 4.0), (32, -3.0))},
]
DTYPES = [torch.float32, torch.bfloat16]


def asked(sampling: dict[str, object], max_tokens: int = 40) -> list[GenerationRequest]:
    return [
        request(prompt, max_tokens=max_tokens, ignore_eos=i % 2 == 0, **sampling) for i, prompt in enumerate(PROMPTS)
    ]


def outcome(answer: Answer) -> tuple[list[int], str, str | None]:
    return answer.ids, answer.text, answer.finish_reason


def oracle(requests: list[GenerationRequest], answers: list[Answer]) -> Callable[[list[int]], list[int]]:
    """What the target is going to say, by context."""
    texts = [[*r.prompt_ids, *a.ids] for r, a in zip(requests, answers, strict=True)]

    def continuation(context: list[int]) -> list[int]:
        return next((text[len(context) :] for text in texts if text[1 : len(context)] == context[1:]), [])

    return continuation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_all_drafters_alone_and_in_a_batch(dtype: torch.dtype, sampling: dict[str, object]) -> None:
    requests = asked(sampling)
    kit = EngineKit(None, dtype=dtype)
    alone = [kit.answer(one) for one in requests]
    expected = [outcome(answer) for answer in alone]

    handlers: dict[str, DraftHandler] = {
        "trained head": draft_head(dtype=dtype),
        "random drafts": RandomHandler(5, 258, incarnation=INCARNATION),
        "oracle": OracleHandler(oracle(requests, alone), incarnation=INCARNATION),
    }
    for name, handler in handlers.items():
        kit = EngineKit(handler, dtype=dtype)
        batched = kit.answers(*requests)
        assert [outcome(answer) for answer in batched] == expected, name
        assert all(
            answer.usage.cycles < len(answer.ids) for answer in batched if name == "oracle" and len(answer.ids) > 3
        )
        assert sum(answer.usage.rejected_prediction_tokens for answer in batched) > 0 or name == "oracle"
        off = kit.answers(*(plain(one) for one in requests))
        assert [outcome(answer) for answer in off] == expected, f"speculation off beside {name}"
    assert [outcome(EngineKit(draft_head(dtype=dtype), dtype=dtype).answer(one)) for one in requests[:3]] == expected[
        :3
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [TreeShape(6, 10, 60), TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(2, 8, 9)], ids=str
)
def test_tree_shapes_and_prefill_chunks(dtype: torch.dtype, shape: TreeShape) -> None:
    requests = asked({"temperature": 0.9, "seed": 11}, max_tokens=30)
    expected = [outcome(answer) for answer in EngineKit(None, dtype=dtype, prefill_chunk=300).answers(*requests)]
    for chunk in (1, 7, 64):
        kit = EngineKit(draft_head(dtype=dtype), dtype=dtype, shape=shape, prefill_chunk=chunk)
        assert [outcome(answer) for answer in kit.answers(*requests)] == expected


@pytest.mark.parametrize("name", ["greedy_A_eagle2_default", "greedy_B_eagle2_default", "greedy_A_small"])
def test_recorded_runs_through_the_engine(name: str) -> None:
    """Output up to the end token as Hugging Face has it, and as many cycles and accepted tokens as were recorded."""
    record = json.loads((GOLDEN / f"{name}.json").read_text())
    model = record["target"][-1]
    shape = TreeShape(record["tree_levels"], record["top_k"], record["total_token"])
    kit = EngineKit(draft_head(model, vocab_size=320), model=model, shape=shape, vocab_size=320)
    for run in record["runs"]:
        expected = run["hf_greedy_ids_stop_at_eos"]
        answer = kit.answer(request(run["prompt_ids"], max_tokens=run["max_new_tokens"]))
        assert answer.ids == expected
        whole = kit.answer(request(run["prompt_ids"], max_tokens=len(run["output_ids"]) + 1, ignore_eos=True))
        assert whole.ids[:-1] == run["output_ids"]
        assert whole.usage.cycles == run["num_cycles"]
        assert whole.usage.accepted_prediction_tokens == sum(cycle["accept_length"] for cycle in run["cycles"])


def test_a_used_engine_is_as_good_as_a_fresh_one() -> None:
    """B02: a long request before a short one changes neither tokens nor accepted and rejected counts."""
    short = request(PROMPTS[1], max_tokens=24)
    fresh = EngineKit(draft_head()).answer(short)
    kit = EngineKit(draft_head())
    kit.answer(request(PROMPTS[7], max_tokens=200, ignore_eos=True))
    kit.answers(*asked({"temperature": 1.0, "seed": 9}))
    used = kit.answer(short)
    assert outcome(used) == outcome(fresh)
    assert replace(used.usage, cached_tokens=0) == fresh.usage
    assert used.usage.cached_tokens == len(short.prompt_ids) - 1, "it had been among the others"


def test_the_oracle_is_accepted_to_full_depth() -> None:
    """B02: as long as the tree keeps the target's own continuation, every cycle commits depth + 1 tokens."""
    one = request(PROMPTS[0], max_tokens=41, ignore_eos=True)
    expected = EngineKit(None).answer(one)
    kit = EngineKit(OracleHandler(oracle([one], [expected]), incarnation=INCARNATION), shape=TreeShape(4, 1, 5))
    answer = kit.answer(one)
    assert answer.ids == expected.ids
    assert [len(commit.token_ids) for commit in answer.commits] == [1, *[5] * 8]
    assert answer.usage.accepted_prediction_tokens == 32


def test_seeds_are_the_requests_own() -> None:
    """B09: a seed gives the same text alone, with neighbours, after others and twice at once; other seeds differ."""
    kit = EngineKit(draft_head())
    for seed in (42, 0, 2**64 - 1, 1 << 40):
        one = request(PROMPTS[5], temperature=1.0, seed=seed, max_tokens=32, ignore_eos=True)
        expected = kit.answer(one).ids
        assert kit.answer(one).ids == expected
        others = [request(p, temperature=1.0, seed=i, max_tokens=32) for i, p in enumerate(PROMPTS[:6])]
        answers = kit.answers(one, *others, one)
        assert answers[0].ids == answers[-1].ids == expected
    seen = {tuple(kit.answer(request(PROMPTS[5], temperature=1.0, seed=s, max_tokens=32)).ids) for s in range(5)}
    assert len(seen) > 1


@pytest.mark.parametrize("penalty", [-2.0, -0.7, 0.0, 0.9, 2.0])
def test_penalties_count_each_token_of_a_block(penalty: float) -> None:
    """B07: on and off are the same for every strength, and the strength matters."""
    one = request(PROMPTS[7], max_tokens=48, frequency_penalty=penalty, ignore_eos=True)
    kit = EngineKit(draft_head())
    answer = kit.answer(one)
    assert outcome(answer) == outcome(kit.answer(plain(one)))
    opposite = request(PROMPTS[7], max_tokens=48, frequency_penalty=-penalty or 2.0, ignore_eos=True)
    assert kit.answer(opposite).ids != answer.ids


def test_ids_beyond_the_vocabulary_never_come_out() -> None:
    """B20 C: an lm_head with more rows than the tokenizer has ids; at a high temperature too."""
    for vocab_size in (258, 200):
        kit = EngineKit(draft_head(vocab_size=vocab_size), vocab_size=vocab_size)
        requests = [request(p, temperature=2.0, seed=i, max_tokens=60, ignore_eos=True) for i, p in enumerate(PROMPTS)]
        assert max(max(answer.ids) for answer in kit.answers(*requests)) < vocab_size


@pytest.mark.parametrize("cut", [1, 2, 5, 17])
@pytest.mark.parametrize("sampling", [SAMPLING[0], SAMPLING[3], SAMPLING[4]], ids=str)
def test_another_verifier_goes_on_where_one_stopped(cut: int, sampling: dict[str, object]) -> None:
    """Prompt and the tokens already sent are enough: the rest is the same, text and usage too."""
    one = request(PROMPTS[2], max_tokens=30, ignore_eos=True, **sampling)
    whole = EngineKit(draft_head()).answer(one)
    sent = whole.ids[:cut]
    again = request(one.prompt_ids, max_tokens=30, ignore_eos=True, output_ids=sent, **sampling)
    rest = EngineKit(draft_head()).answer(again)
    assert sent + rest.ids == whole.ids
    assert rest.usage.completion_tokens == whole.usage.completion_tokens == 30
    assert whole.text.endswith(rest.text)


def test_prompt_of_one_token_and_context_filled_to_the_end() -> None:
    kit = EngineKit(draft_head(), max_model_len=64)
    for length in (1, 2, 40, 62, 63):
        one = request(prompt_ids("x" * 100)[:length], max_tokens=200, ignore_eos=True)
        answer = kit.answer(one)
        assert len(answer.ids) == 64 - length
        assert answer.finish_reason == "length"
        assert answer.ids == kit.answer(plain(one)).ids
