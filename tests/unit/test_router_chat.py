"""The API as clients see it: the official one, httpx, and raw events."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from eagle2.errors import RequestError, UnavailableError
from eagle2.router.api import create_app
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet
from fakes.server import serving
from fakes.verifier import CountingVerifier, ForcedVerifier, describe

HOSTILE = 'a\u2028b\u0085c\n\ndata: x"'
CHAT = {"model": "tiny/bytes", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": "tiny/bytes", "prompt": "Hi"}
BOTH = [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)]


def client_of(verifier: Any, settings: RouterSettings | None = None) -> httpx.AsyncClient:
    app = create_app(
        SingleFleet(verifier, 256), settings or RouterSettings(), draw_seed=lambda: 77, clock=lambda: 1000.0
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


def events(body: bytes) -> list[Any]:
    """The data of every event, with the framing checked byte by byte."""
    assert body.endswith(b"\n\n")
    assert body.isascii()
    blocks = body[:-2].split(b"\n\n")
    found: list[Any] = []
    for block in blocks:
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        assert b"\r" not in block
        found.append("[DONE]" if block == b"data: [DONE]" else json.loads(block[6:]))
    return found


def text_of(chunk: Any) -> str:
    return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in chunk["choices"])


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    texts = [HOSTILE[:3], HOSTILE[3:7], HOSTILE[7:]]
    with serving(create_app(SingleFleet(ForcedVerifier(texts), 256), RouterSettings())) as url:
        yield url


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_stream_grammar(path: str, body: dict[str, Any], include_usage: bool) -> None:
    async with client_of(ForcedVerifier([HOSTILE[:4], "", HOSTILE[4:]])) as client:
        asked = {**body, "stream": True, "stream_options": {"include_usage": include_usage}}
        response = await client.post(path, json=asked)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.content)
    assert done == "[DONE]"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert "".join(text_of(c) for c in chunks) == HOSTILE
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    if path.startswith("/v1/chat"):
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert all("role" not in c["delta"] for chunk in chunks[1:] for c in chunk["choices"])
    if include_usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len(HOSTILE.encode())
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_whole_answer(path: str, body: dict[str, Any], include_usage: bool) -> None:
    async with client_of(ForcedVerifier([HOSTILE[:4], HOSTILE[4:]])) as client:
        asked = {**body, "stream": False, "stream_options": {"include_usage": include_usage}}
        response = await client.post(path, json=asked)
    assert response.headers["content-type"] == "application/json"
    assert response.content.isascii()
    answer = response.json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"] if "message" in choice else choice["text"]) == HOSTILE
    assert choice["finish_reason"] == "stop"
    completion = len(HOSTILE.encode())
    prompt = answer["usage"]["prompt_tokens"]
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2},
    }
    assert prompt == len("[user]Hi\n[assistant]" if "messages" in body else " Hi")


def test_openai_client(hostile: str) -> None:
    client = openai.OpenAI(base_url=hostile + "/v1", api_key="sk-x", max_retries=0)
    assert [m.id for m in client.models.list()] == ["tiny/bytes"]
    assert client.models.retrieve("tiny/bytes").created == 1_700_000_000
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(model="tiny/bytes", messages=messages)
    assert answer.choices[0].message.content == HOSTILE
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 3
    messages += [answer.choices[0].message, {"role": "user", "content": "More"}]
    stream = client.chat.completions.create(
        model="tiny/bytes", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == HOSTILE
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > 0
    plain = client.completions.create(model="tiny/bytes", prompt="Hi", stream=True)
    assert "".join(c.choices[0].text for c in plain if c.choices) == HOSTILE
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny/bytes", messages=messages, n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=messages)
    assert unknown.value.code == "model_not_found"


def test_lines_of_httpx(hostile: str) -> None:
    text = ""
    with httpx.stream("POST", hostile + "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        text += text_of(json.loads(line.removeprefix("data: ")))
    assert text == HOSTILE


@pytest.mark.parametrize("accepted", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_counts_agree(path: str, body: dict[str, Any], max_tokens: int, accepted: int) -> None:
    verifier = CountingVerifier(accepted)
    async with client_of(verifier) as client:
        asked = {**body, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
        whole = (await client.post(path, json=asked)).json()
        stream = {**asked, "stream": True, "stream_options": {"include_usage": True}}
        chunks = events((await client.post(path, json=stream)).content)[:-1]
    choice = whole["choices"][0]
    streamed = [i for chunk in chunks for c in chunk["choices"] for i in c["token_ids"]]
    assert choice["token_ids"] == streamed == [97] * max_tokens
    assert choice["finish_reason"] == chunks[-2]["choices"][0]["finish_reason"] == "length"
    for usage in (whole["usage"], chunks[-1]["usage"]):
        assert usage["completion_tokens"] == max_tokens
        assert usage["total_tokens"] == usage["prompt_tokens"] + max_tokens
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == list(verifier.requests[0].prompt_ids)
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 1


async def test_ids_only_on_request() -> None:
    async with client_of(ForcedVerifier()) as client:
        assert "token_ids" not in (await client.post("/v1/completions", json=PROMPT)).text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("Too long.", param="prompt", code="context_length_exceeded"), 400, "context_length_exceeded"),
        (UnavailableError("No proposer."), 503, "unavailable"),
        (RuntimeError("secret CANARY"), 500, "internal_error"),
    ],
)
async def test_errors_before_the_first_commit_have_a_status(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    verifier = ForcedVerifier(before=error)
    async with client_of(verifier) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == code
    assert "CANARY" not in response.text
    assert "Traceback" not in response.text
    assert verifier.running == 0


@pytest.mark.parametrize("how", [{"error": "The target stumbled."}, {"after": RuntimeError("CANARY")}])
async def test_errors_in_a_stream_are_events(how: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    verifier = ForcedVerifier(["abc", "def"], **how)
    async with client_of(verifier) as client:
        streamed = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        whole = await client.post("/v1/chat/completions", json=CHAT)
    *chunks, last = events(streamed.content)
    assert set(last) == {"error"}
    assert last["error"]["type"] == "server_error"
    assert "".join(text_of(c) for c in chunks) == "abcdef"
    assert all(c["finish_reason"] is None for chunk in chunks for c in chunk["choices"])
    assert whole.status_code == 500
    assert set(whole.json()["error"]) == {"message", "type", "param", "code"}
    assert "CANARY" not in streamed.text + whole.text + caplog.text
    if "error" in how:
        assert last["error"]["message"] == "The target stumbled."


async def test_a_deadline_that_passed_is_a_504_or_an_event() -> None:
    sentence = "The deadline passed after 3 tokens of the answer."
    verifier = ForcedVerifier(["abc"], error=sentence, error_code="deadline_exceeded")
    async with client_of(verifier) as client:
        whole = await client.post("/v1/chat/completions", json=CHAT)
        streamed = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    expected = {"message": sentence, "type": "server_error", "param": None, "code": "deadline_exceeded"}
    assert (whole.status_code, whole.json()) == (504, {"error": expected})
    *chunks, last = events(streamed.content)
    assert (streamed.status_code, last) == (200, {"error": expected})
    assert "".join(text_of(chunk) for chunk in chunks) == "abc"


async def test_an_iterator_that_just_ends_is_an_error() -> None:
    async with client_of(ForcedVerifier([])) as client:
        response = await client.post("/v1/completions", json=PROMPT)
    assert response.status_code == 503
    error = response.json()["error"]
    assert (error["code"], error["message"]) == ("unavailable", "The generation ended without saying why.")


async def test_normal_ends_abort_nothing() -> None:
    verifier = ForcedVerifier()
    async with client_of(verifier) as client:
        for stream in (True, False) * 5:
            await client.post("/v1/completions", json={**PROMPT, "stream": stream})
        text = (await client.get("/metrics")).text
    assert (verifier.completed, verifier.aborted, verifier.running) == (10, 0, 0)
    assert "eagle2_requests_aborted_total{" not in text
    assert 'eagle2_requests_total{endpoint="/v1/completions",status="200"} 10.0' in text


async def test_models_and_unknown_routes() -> None:
    async with client_of(ForcedVerifier(), RouterSettings(model_name="bytes")) as client:
        listed = (await client.get("/v1/models")).json()
        assert [m["id"] for m in listed["data"]] == ["bytes"]
        assert listed["data"][0]["max_model_len"] == 512
        assert (await client.get("/v1/models/bytes")).json() == listed["data"][0]
        for method, path, status, code in [
            ("GET", "/v1/models/tiny/bytes", 404, "model_not_found"),
            ("GET", "/v1/models/../../etc/passwd", 404, None),
            ("GET", "/nothing", 404, "not_found"),
            ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
            ("DELETE", "/health", 405, "method_not_allowed"),
        ]:
            response = await client.request(method, path)
            assert response.status_code == status, path
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert code is None or error["code"] == code


async def test_probes() -> None:
    verifier = ForcedVerifier(stats={'kv_slots_used{side="target"}': 3.0})
    verifier.down = UnavailableError("The target is loading.")
    async with client_of(verifier) as client:
        assert (await client.get("/health")).status_code == 200
        waiting = await client.get("/ready")
        assert waiting.status_code == 503
        assert waiting.json()["error"]["message"] == "The target is loading."
        assert (await client.get("/v1/models")).status_code == 503
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 503
        assert "eagle2_verifier_up 0.0" in (await client.get("/metrics")).text
        verifier.down = None
        assert (await client.get("/ready")).json() == {"status": "ready", "model": "tiny/bytes"}
        text = (await client.get("/metrics")).text
        assert "eagle2_verifier_up 1.0" in text
        assert 'eagle2_kv_slots_used{side="target"} 3.0' in text
        verifier.down = RuntimeError("gone")
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200


async def test_a_model_that_cannot_be_used_is_not_ready() -> None:
    async with client_of(ForcedVerifier(description=describe(tokenizer_json="{}"))) as client:
        response = await client.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "not_ready"


async def test_a_model_without_a_chat_template_still_completes() -> None:
    async with client_of(ForcedVerifier(description=describe(chat_template=None))) as client:
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


async def test_the_model_is_described_once() -> None:
    verifier = ForcedVerifier()
    async with client_of(verifier) as client:
        for _ in range(3):
            await client.post("/v1/completions", json=PROMPT)
            await client.get("/ready")
    assert verifier.describes == 1


async def test_identity() -> None:
    verifier = ForcedVerifier()
    async with client_of(verifier) as client:
        key = {"Authorization": "Bearer sk-CANARY"}
        named = await client.post("/v1/completions", json=PROMPT, headers={**key, "X-Request-Id": "trace.1"})
        again = await client.post("/v1/completions", json=PROMPT, headers={**key, "X-Request-Id": "trace.1"})
        odd = await client.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": "no spaces"})
        error = await client.get("/nothing")
    assert named.headers["x-request-id"] == again.headers["x-request-id"] == "trace.1"
    assert odd.headers["x-request-id"].startswith("req-")
    assert error.headers["x-request-id"].startswith("req-")
    routers = {reply.headers["x-eagle2-router"] for reply in (named, again, odd, error)}
    assert len(routers) == 1
    assert all(routers)
    first, second, third = verifier.requests
    assert first.tenant == second.tenant != third.tenant == "anonymous"
    assert "CANARY" not in first.tenant
    assert first.request_id.startswith("trace.1.")
    assert first.request_id != second.request_id


async def test_seed_and_deadline() -> None:
    verifier = ForcedVerifier()
    async with client_of(verifier, RouterSettings(request_timeout_s=5)) as client:
        for seed in (None, 0, -1, 2**64 - 1, -(2**63)):
            assert (await client.post("/v1/completions", json={**PROMPT, "seed": seed})).status_code == 200
    assert [r.sampling.seed for r in verifier.requests] == [77, 0, 2**64 - 1, 2**64 - 1, 2**63]
    assert {r.deadline for r in verifier.requests} == {1005.0}


def test_drawn_seeds_differ() -> None:
    from eagle2.router.api import draw_seed

    seeds = {draw_seed() for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_no_torch() -> None:
    code = "import sys, eagle2.router.api; print([name for name in ('torch', 'ray') if name in sys.modules])"
    services = Path(__file__).parents[2] / "services"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=services, timeout=120
    )
    assert done.stdout.strip() == "[]"
