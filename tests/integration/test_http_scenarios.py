"""Faults that people reported in systems like this one, tried from outside: over HTTP, against a real engine.

B02 greedy, B06 the next turn, B07 penalties, B09 seeds, B12 stops, B13 counts, B23 clients that leave, B39 tenants.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from eagle2.router.api import create_app
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.verifier.service import VerifierService
from fakes.drafts import OracleHandler
from fakes.engines import EOS, INCARNATION, PROMPTS, EngineKit, prompt_ids
from fakes.engines import request as engine_request
from fakes.server import serving
from fakes.verifier import describe
from integration.conftest import Stack

Body = dict[str, Any]


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, limits=limits) as opened:
        yield opened


async def complete(client: httpx.AsyncClient, prompt: str | list[int], **fields: Any) -> Body:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 32, "return_token_ids": True, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: Body = response.json()
    return answer


async def streamed(client: httpx.AsyncClient, prompt: str, **fields: Any) -> Body:
    """The same out of a stream: text, ids, reason and usage put together again."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 32, "return_token_ids": True, "stream": True}
    text, ids, reason, usage = "", [], None, None
    async with client.stream(
        "POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}, **fields}
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                text += choice["text"]
                ids += choice.get("token_ids") or []
                reason = choice["finish_reason"] or reason
            usage = chunk["usage"] or usage
    return {"choices": [{"text": text, "token_ids": ids, "finish_reason": reason}], "usage": usage}


def outcome(answer: Body) -> tuple[Any, ...]:
    choice = answer["choices"][0]
    return choice["token_ids"], choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]


async def test_b02_greedy_is_the_same_on_and_off(stack: Stack, client: httpx.AsyncClient) -> None:
    off = [await complete(client, prompt, speculation=False, max_tokens=64) for prompt in PROMPTS]
    alone = [await complete(client, prompt, max_tokens=64) for prompt in PROMPTS]
    together = await asyncio.gather(*(complete(client, prompt, max_tokens=64) for prompt in PROMPTS))
    for answers in (alone, together):
        assert list(map(outcome, answers)) == list(map(outcome, off))
    assert all(a["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0 for a in off)
    assert sum(a["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for a in alone) > 50
    # The engine itself, without any server, says the same.
    assert off[0]["choices"][0]["token_ids"] == EngineKit(None).answer(engine_request(PROMPTS[0], max_tokens=64)).ids


@pytest.mark.parametrize("penalty", [-2, -0.3, 0, 1.1, 2])
async def test_b07_penalties(client: httpx.AsyncClient, penalty: float) -> None:
    prompt = "the rain the rain the rain the "
    fields = {"frequency_penalty": penalty, "ignore_eos": True}
    on = await complete(client, prompt, **fields)
    assert outcome(on) == outcome(await complete(client, prompt, speculation=False, **fields))
    if abs(penalty) == 2:
        other = await complete(client, prompt, **{**fields, "frequency_penalty": -penalty})
        assert other["choices"][0]["token_ids"] != on["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.4},
        {"logit_bias": {"97": 30}},
        {"logit_bias": {"32": -100, "101": 5}, "temperature": 1, "seed": 4},
        {"temperature": 0.8, "top_p": 0.8, "seed": 1},
        {"temperature": 1.2, "top_k": 3, "seed": 2},
        {"temperature": 2, "min_p": 0.2, "seed": 3},
    ],
    ids=str,
)
async def test_every_sampling_field_is_honoured_alike_with_and_without_drafts(
    client: httpx.AsyncClient, fields: Body
) -> None:
    on = await complete(client, PROMPTS[5], ignore_eos=True, **fields)
    assert outcome(on) == outcome(await complete(client, PROMPTS[5], ignore_eos=True, speculation=False, **fields))
    default = {"temperature": fields.get("temperature", 0), "seed": fields.get("seed", 0)}
    neutral = await complete(client, PROMPTS[5], ignore_eos=True, **default)
    assert on["choices"][0]["token_ids"] != neutral["choices"][0]["token_ids"], "the field changes the answer"


async def test_b09_seeds(client: httpx.AsyncClient) -> None:
    prompt = "A robot may not injure a human being"
    for seed in (42, 0, 7777777, 2**64 - 1):
        fields = {"temperature": 1.0, "seed": seed, "ignore_eos": True}
        first = outcome(await complete(client, prompt, **fields))
        assert outcome(await complete(client, prompt, **fields)) == first
        others = [complete(client, p, temperature=1.0) for p in PROMPTS[:7]]
        beside = await asyncio.gather(complete(client, prompt, **fields), *others)
        assert outcome(beside[0]) == first
        twins = await asyncio.gather(*(complete(client, prompt, **fields) for _ in range(2)))
        assert [outcome(twin) for twin in twins] == [first, first]
        assert outcome(await complete(client, prompt, speculation=False, **fields)) == first
    unseeded = {tuple((await complete(client, prompt, temperature=1.0))["choices"][0]["token_ids"]) for _ in range(5)}
    assert len(unseeded) >= 2


@pytest.mark.parametrize("seed", ["42", 1.5, 2**64, -(2**63) - 1, [], True])
async def test_b09_seeds_that_are_refused(client: httpx.AsyncClient, seed: object) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a", "seed": seed})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "seed"


async def test_b09_the_100th_request_is_like_the_first(client: httpx.AsyncClient) -> None:
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 16}
    first = outcome(await complete(client, PROMPTS[0], **fields))
    for _ in range(5):
        await asyncio.gather(*(complete(client, p, temperature=1.0, max_tokens=4) for p in [*PROMPTS, *PROMPTS, "x"]))
    assert outcome(await complete(client, PROMPTS[0], **fields)) == first


async def test_b12_stops(client: httpx.AsyncClient) -> None:
    whole = await complete(client, PROMPTS[2], max_tokens=60, ignore_eos=True)
    text, ids = whole["choices"][0]["text"], whole["choices"][0]["token_ids"]
    for start, end in ((9, 12), (10, 18), (16, 17), (20, 28)):
        stop = text[start:end]
        at = text.find(stop)
        for ask in (complete, streamed):
            answer = await ask(client, PROMPTS[2], max_tokens=60, ignore_eos=True, stop=["never said", stop])
            assert answer["choices"][0]["text"] == text[:at]
            assert answer["choices"][0]["token_ids"] == ids[: at + len(stop)]
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] == at + len(stop)
    token = next(i for i, t in enumerate(ids) if ids.index(t) == i and i > 5)
    answer = await complete(client, PROMPTS[2], max_tokens=60, ignore_eos=True, stop_token_ids=[ids[token]])
    assert answer["choices"][0]["token_ids"] == ids[: token + 1]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 64])
async def test_b13_counts(client: httpx.AsyncClient, max_tokens: int) -> None:
    answers = [
        await ask(client, PROMPTS[7], max_tokens=max_tokens, ignore_eos=True, speculation=speculation)
        for ask in (complete, streamed)
        for speculation in (True, False)
    ]
    assert len({str(outcome(answer)) for answer in answers}) == 1
    for answer in answers:
        choice, usage = answer["choices"][0], answer["usage"]
        assert usage["completion_tokens"] == len(choice["token_ids"]) == max_tokens
        assert choice["finish_reason"] == "length"
        assert usage["total_tokens"] == usage["prompt_tokens"] + max_tokens
        assert usage["prompt_tokens"] == 1 + len(PROMPTS[7])


async def test_b23_clients_that_leave(stack: Stack, client: httpx.AsyncClient) -> None:
    """30 requests that would run long, half of them streams, more than fit into the batch; all sockets are closed."""
    stats = stack.kit.stats
    aborted = stats.get(metrics.NUM_REQUESTS_ABORTED)
    body = {"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "temperature": 0}

    async def leave(stream: bool) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await read_all(client, {**body, "stream": stream})

    await asyncio.gather(*(leave(i % 2 == 0) for i in range(30)))
    await settled(lambda: stats.get(metrics.NUM_REQUESTS_RUNNING) + stats.get(metrics.NUM_REQUESTS_WAITING) == 0)
    await settled(lambda: stack.kit.target.pool.num_used == 0)
    await settled(lambda: stack.handler.pool.num_used == 0)
    assert stats.get(metrics.NUM_REQUESTS_ABORTED) - aborted == 30
    drafts = stats.get(metrics.NUM_DRAFTS)
    await asyncio.sleep(0.3)
    assert stats.get(metrics.NUM_DRAFTS) == drafts, "nothing is drafted for them any more"

    aborted = stats.get(metrics.NUM_REQUESTS_ABORTED)
    for _ in range(10):
        await asyncio.gather(*(complete(client, p, max_tokens=3) for p in PROMPTS for _ in range(2)))
    assert stats.get(metrics.NUM_REQUESTS_ABORTED) == aborted, "a normal end is no abort"


def cached(answer: Body) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def test_b06_the_next_turn_reads_only_the_new_line(stack: Stack, client: httpx.AsyncClient) -> None:
    """History and a new line, as token ids, as far as an end inside a block; `cached_tokens` says what was found."""
    prompt = "the captain of the seventh ship "
    whole = await complete(client, prompt, max_tokens=40, ignore_eos=True)
    ids = whole["choices"][0]["token_ids"]
    place = next(i for i in range(5, 40) if ids.index(ids[i]) == i)
    ask = {"max_tokens": 40, "ignore_eos": True, "stop_token_ids": [ids[place]]}
    first = await complete(client, prompt, **ask)
    assert cached(first) == cached(await streamed(client, prompt, **ask)) == first["usage"]["prompt_tokens"] - 1
    history = [*prompt_ids(prompt), *first["choices"][0]["token_ids"]]
    before = stack.kit.stats.get(metrics.PREFILL_TOKENS)
    second = await complete(client, [*history, *b"+ so "])
    assert len(history) - 1 <= cached(second) <= len(history)
    assert stack.kit.stats.get(metrics.PREFILL_TOKENS) - before == len(history) + 5 - cached(second)
    cold = EngineKit(None, prefix_cache=False).answer(engine_request([*history, *b"+ so "], max_tokens=32))
    assert second["choices"][0]["token_ids"] == cold.ids


def sampled_with_an_end_at_index_2(prompt: str) -> tuple[int, list[int]]:
    """A seed and its answer at temperature 1, 60 tokens that go on behind the first end of text. The prompt's own step
    gives the first token, each block of a right draft of depth 6 seven; the end is at index 2 of such a block."""
    seeds = range(16, 24)
    asked = [engine_request(prompt, max_tokens=60, ignore_eos=True, temperature=1.0, seed=seed) for seed in seeds]
    for seed, answer in zip(seeds, EngineKit(None).answers(*asked), strict=True):
        if EOS in answer.ids[4:] and (answer.ids.index(EOS) - 1) % 7 == 2:
            return seed, answer.ids
    raise AssertionError("no answer ends there; take other seeds")


async def test_b06_an_end_of_text_at_index_2_of_a_block_of_six() -> None:
    """The oracle drafts on behind the end, as the target would if it did not stop there. The second turn names the
    same session and brings the text that was seen."""
    prompt, line, start = PROMPTS[1], " and then ", len(prompt_ids(PROMPTS[1]))
    seed, whole = sampled_with_an_end_at_index_2(prompt)
    end = whole.index(EOS)
    handler = OracleHandler(lambda context: whole[len(context) - start :], incarnation=INCARNATION)
    kit = EngineKit(handler, shape=TreeShape(6, 1, 7))
    service = VerifierService(kit.engine, describe())
    with serving(create_app(SingleFleet(service, 256), RouterSettings())) as url:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            first = await complete(client, prompt, session_id="s1", max_tokens=60, temperature=1, seed=seed)
            ids, text = first["choices"][0]["token_ids"], first["choices"][0]["text"]
            assert ids == whole[: end + 1]
            assert first["choices"][0]["finish_reason"] == "stop"
            assert {step.depth for step in handler.steps if step.entries} == {6}
            blocks = (end - 1) // 7
            details = first["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] == 6 * blocks + 3, "the oracle was right to the end"

            seen = start + len(text.encode())
            before = kit.stats.get(metrics.PREFILL_TOKENS)
            second = await complete(client, prompt + text + line, session_id="s1", max_tokens=20)
            assert second["usage"]["prompt_tokens"] == seen + len(line)
            assert seen - 1 <= cached(second) <= seen
            assert len(line) <= kit.stats.get(metrics.PREFILL_TOKENS) - before <= len(line) + 1
            # What would have come behind the end cannot be found.
            behind = await complete(client, [*prompt_ids(prompt), *whole], session_id="s1", max_tokens=2)
            assert cached(behind) <= start + end + 1
    service.close()
    cold = EngineKit(None, prefix_cache=False).answer(engine_request(prompt + text + line, max_tokens=20))
    assert second["choices"][0]["token_ids"] == cold.ids


async def test_b39_keys_share_no_cache(client: httpx.AsyncClient) -> None:
    """The same prompt with another key is cold, and so is one whose name looks alike; the own key's is warm."""
    prompt = "\u00a7 seven lighthouses of the northern coast " * 3
    tokens, begin = len(prompt_ids(prompt)), 1  # that all texts share
    keys = [None, "org_1", "org_12345", "org_1 2345"]
    answers = []
    for expected in ((0, begin), (tokens - 1,)):
        for key in keys:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "user": "s1", "return_token_ids": True}
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200, response.text
            answers.append(response.json())
            assert cached(answers[-1]) in expected, key
    assert len({str(outcome(answer)) for answer in answers}) == 1


async def read_all(client: httpx.AsyncClient, body: Body) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass


async def settled(condition: Any, within_s: float = 30) -> None:
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit, "not settled in time"
        await asyncio.sleep(0.02)
