"""Every field of a request: a good value reaches the verifier, a bad one is a 400 that names the field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle2.protocol import GenerationRequest
from eagle2.router.api import create_app
from eagle2.router.schemas import MAX_STOP_LENGTH, MAX_STOP_STRINGS, ChatBody, CompletionBody, Message
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet
from fakes.verifier import VOCAB_SIZE, ForcedVerifier, describe

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT: dict[str, Any] = {"prompt": "Hi"}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": PROMPT}
NAN, INFINITY = float("nan"), float("inf")


async def post(
    path: str, body: dict[str, Any], verifier: ForcedVerifier | None = None, **limits: Any
) -> tuple[httpx.Response, GenerationRequest | None]:
    verifier = verifier or ForcedVerifier()
    app = create_app(SingleFleet(verifier, 256), RouterSettings(**limits), draw_seed=lambda: 77)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        headers = {"Content-Type": "application/json"}
        response = await client.post(path, content=json.dumps(body), headers=headers)
    return response, verifier.requests[0] if verifier.requests else None


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


SAMPLING = [
    ("temperature", 0, 0.0),
    ("temperature", 2, 2.0),
    ("temperature", 0.7, 0.7),
    ("temperature", None, 1.0),
    ("top_p", 0.001, 0.001),
    ("top_p", 1, 1.0),
    ("top_k", 0, 0),
    ("top_k", -1, 0),
    ("top_k", 40, 40),
    ("min_p", 0, 0.0),
    ("min_p", 1.0, 1.0),
    ("seed", 0, 0),
    ("seed", 42, 42),
    ("seed", None, 77),
    ("presence_penalty", -2, -2.0),
    ("presence_penalty", 2, 2.0),
    ("frequency_penalty", -0.5, -0.5),
    ("repetition_penalty", 1.3, 1.3),
    ("repetition_penalty", 2, 2.0),
    ("logit_bias", {"7": 5, "0": -100}, ((0, -100.0), (7, 5.0))),
    ("logit_bias", {str(VOCAB_SIZE - 1): 100}, ((VOCAB_SIZE - 1, 100.0),)),
    ("logit_bias", {}, ()),
    ("logit_bias", None, ()),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("field", "value", "arrives"), SAMPLING)
async def test_sampling_arrives(path: str, field: str, value: Any, arrives: Any) -> None:
    response, request = await post(path, {**PATHS[path], field: value})
    assert response.status_code == 200, response.text
    assert request is not None
    assert getattr(request.sampling, field) == arrives


STOPPING = [
    ("stop", "END", "stop_strings", ("END",)),
    ("stop", ["b", "a", "\n\n"], "stop_strings", ("b", "a", "\n\n")),
    ("stop", [], "stop_strings", ()),
    ("stop", None, "stop_strings", ()),
    ("stop", ["x" * MAX_STOP_LENGTH] * MAX_STOP_STRINGS, "stop_strings", ("x" * MAX_STOP_LENGTH,) * MAX_STOP_STRINGS),
    ("stop_token_ids", [3, 257], "stop_token_ids", (3, 257)),
    ("ignore_eos", True, "ignore_eos", True),
    ("ignore_eos", None, "ignore_eos", False),
    ("max_tokens", 1, "max_tokens", 1),
    ("max_tokens", 9, "max_tokens", 9),
    ("max_completion_tokens", 8, "max_tokens", 8),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("field", "value", "name", "arrives"), STOPPING)
async def test_stopping_arrives(path: str, field: str, value: Any, name: str, arrives: Any) -> None:
    response, request = await post(path, {**PATHS[path], field: value})
    assert response.status_code == 200, response.text
    assert request is not None
    assert getattr(request.stop, name) == arrives


@pytest.mark.parametrize("path", PATHS)
async def test_speculation_arrives(path: str) -> None:
    for value, arrives in ((False, False), (True, True), (None, True)):
        _, request = await post(path, {**PATHS[path], "speculation": value})
        assert request is not None
        assert request.speculation is arrives


PRIORITIES = [
    ({}, "interactive"),
    ({"priority": None}, "interactive"),
    ({"priority": "interactive"}, "interactive"),
    ({"priority": "batch"}, "batch"),
    ({"service_tier": "flex"}, "batch"),
    ({"service_tier": "auto"}, "interactive"),
    ({"service_tier": "flex", "priority": "interactive"}, "interactive"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "arrives"), PRIORITIES)
async def test_priority_arrives(path: str, fields: dict[str, Any], arrives: str) -> None:
    response, request = await post(path, {**PATHS[path], **fields})
    assert response.status_code == 200, response.text
    assert request is not None
    assert request.priority == arrives


async def test_a_bad_priority_is_told_the_good_ones() -> None:
    for value in (0, "high", "Batch", ["batch"]):
        response, _ = await post("/v1/completions", {**PROMPT, "priority": value})
        message = error_of(response)["message"]
        assert "'interactive' or 'batch'" in message, message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("asked", "most", "after"),
    [(None, None, None), (2, None, 2.0), (0.25, 5, 0.25), (30, 5, 5.0), (None, 5, 5.0)],
)
async def test_a_timeout_becomes_a_deadline(
    path: str, asked: float | None, most: float | None, after: float | None
) -> None:
    """The sooner of the client's and the operator's."""
    verifier = ForcedVerifier()
    app = create_app(SingleFleet(verifier, 256), RouterSettings(request_timeout_s=most), clock=lambda: 1000.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        response = await client.post(path, json={**PATHS[path], "timeout": asked})
    assert response.status_code == 200, response.text
    deadline = verifier.requests[0].deadline
    assert deadline == (None if after is None else 1000.0 + after)


HARMLESS = {
    "user": "u",
    "session_id": "s1",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "safety_identifier": "i",
    "n": 1,
    "stream": None,
    "stream_options": {"include_usage": None, "include_obfuscation": False},
}


@pytest.mark.parametrize("path", PATHS)
async def test_harmless_fields_change_nothing(path: str) -> None:
    _, plain = await post(path, PATHS[path])
    extra = {"/v1/completions": {"echo": False, "best_of": 1, "suffix": None, "logprobs": None}}.get(
        path,
        {
            "logprobs": False,
            "top_logprobs": 0,
            "tools": [],
            "tool_choice": "none",
            "functions": None,
            "parallel_tool_calls": False,
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "audio": None,
        },
    )
    response, request = await post(path, {**PATHS[path], **HARMLESS, **extra})
    assert response.status_code == 200, response.text
    assert plain is not None
    assert request is not None
    assert request.sampling == plain.sampling
    assert request.stop == plain.stop
    assert request.prompt_ids == plain.prompt_ids


REFUSED = [
    ("temperature", -1),
    ("temperature", 2.01),
    ("temperature", 1e9),
    ("temperature", NAN),
    ("temperature", INFINITY),
    ("temperature", 10**400),
    ("temperature", "0.7"),
    ("temperature", True),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", -1),
    ("top_p", 1.5),
    ("top_p", NAN),
    ("top_k", -2),
    ("top_k", 1.0),
    ("top_k", 2**40),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", "42"),
    ("seed", 1.0),
    ("seed", True),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2**63),
    ("max_tokens", 8.0),
    ("max_tokens", "8"),
    ("max_completion_tokens", 0),
    ("presence_penalty", 1e9),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -INFINITY),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 2.1),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1000000000": 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {"01": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"1": 100.5}),
    ("logit_bias", {"1": NAN}),
    ("logit_bias", {"1": "2"}),
    ("logit_bias", [[1, 2]]),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["ok", 3]),
    ("stop", 3),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
    ("stop", ["x"] * 10_000),
    ("stop", "x" * (MAX_STOP_LENGTH + 1)),
    ("stop", "\ud800"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [10**9]),
    ("stop_token_ids", 3),
    ("ignore_eos", 1),
    ("speculation", "yes"),
    ("return_token_ids", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": 1}),
    ("stream_options", {"other": True}),
    ("stream_options", True),
    ("n", 2),
    ("n", 0),
    ("n", True),
    ("n", 5_000_000),
    ("logprobs", True),
    ("user", 3),
    ("user", "x" * 10_000),
    ("session_id", "x" * 10_000),
    ("metadata", {"a": 1}),
    ("model", 5),
    ("model", "\udfff"),
    ("priority", "high"),
    ("priority", 0),
    ("priority", True),
    ("timeout", 0),
    ("timeout", -1),
    ("timeout", 86_401),
    ("timeout", INFINITY),
    ("timeout", "5"),
    ("timeout", True),
    ("unknown_field", 1),
    ("unknown_field", None),
    ("cache_salt", "x"),
]
REFUSED_IN = {
    "/v1/chat/completions": [
        ("top_logprobs", 1_000_000_000),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("suffix", "x"),
        ("prompt", "Hi"),
        ("best_of", 2),
        ("messages", []),
        ("messages", None),
        ("messages", "Hi"),
        ("messages", [3]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"content": "Hi"}]),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "user", "content": []}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "user", "content": "a\ud800b"}]),
        ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}]),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [{"role": "user", "content": "x", "extra": 1}]),
        ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
    ],
    "/v1/completions": [
        ("logprobs", 0),
        ("logprobs", 5),
        ("suffix", "x"),
        ("echo", True),
        ("best_of", 2),
        ("messages", [{"role": "user", "content": "x"}]),
        ("prompt", None),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [""]),
        ("prompt", [[]]),
        ("prompt", ["a", "b"]),
        ("prompt", [[1], [2]]),
        ("prompt", [1, "a"]),
        ("prompt", [1.0]),
        ("prompt", [True]),
        ("prompt", [-1]),
        ("prompt", [10**9]),
        ("prompt", [2**70]),
        ("prompt", [VOCAB_SIZE]),
        ("prompt", {"text": "a"}),
        ("prompt", 3),
        ("prompt", "\ud800"),
    ],
}
BAD = [(path, field, value) for path in PATHS for field, value in [*REFUSED, *REFUSED_IN[path]]]


@pytest.mark.parametrize(("path", "field", "value"), BAD)
async def test_bad_values_are_named(path: str, field: str, value: Any) -> None:
    response, request = await post(path, {**PATHS[path], field: value})
    error = error_of(response)
    assert error["param"] is not None
    assert re.split(r"[.\[]", error["param"])[0] == field
    assert field in error["message"]
    assert request is None
    assert len(response.content) < 1000


PROMPTS = [
    ("Hi", (256, *b"Hi")),
    (["Hi"], (256, *b"Hi")),
    ([1, 2, 257], (1, 2, 257)),
    ([[5, 6]], (5, 6)),
    ("é\u2028😀", (256, *"é\u2028😀".encode())),
]


@pytest.mark.parametrize(("prompt", "ids"), PROMPTS)
async def test_prompts_arrive(prompt: Any, ids: tuple[int, ...]) -> None:
    _, request = await post("/v1/completions", {"prompt": prompt})
    assert request is not None
    assert request.prompt_ids == ids


async def test_messages_arrive() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": [], "audio": None},
        {"role": "user", "content": ""},
    ]
    _, request = await post("/v1/chat/completions", {"messages": messages})
    assert request is not None
    text = "[system]Be brief.\n[user]a\nb\n[assistant]c\n[user]\n[assistant]"
    assert bytes(request.prompt_ids).decode() == text


IMAGES = [
    "http://169.254.169.254/latest/meta-data/",
    "http://127.0.0.1:6379/",
    "data:image/png;base64,AAAA",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("url", IMAGES)
async def test_other_content_is_refused_without_a_look(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an outbound connection")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    content = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": url}}]
    response, _ = await post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    error = error_of(response)
    assert error["param"] == "messages[0].content[1].type"
    assert "unsupported content" in error["message"]
    assert url not in response.text


@pytest.mark.parametrize("name", ["gpt-5", "http://x/y", "../../etc/passwd", "", "tiny/bytes "])
async def test_other_models_are_404(name: str) -> None:
    response, _ = await post("/v1/completions", {**PROMPT, "model": name})
    error = error_of(response, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("body", [{**CHAT, "model": "tiny/bytes"}, CHAT])
async def test_the_model_may_be_named(body: dict[str, Any]) -> None:
    response, _ = await post("/v1/chat/completions", body)
    assert response.status_code == 200


async def test_lengths() -> None:
    small = describe(max_model_len=40)
    for length, status in ((38, 200), (39, 400), (500, 400)):  # one start token is added
        response, request = await post("/v1/completions", {"prompt": "a" * length}, ForcedVerifier(description=small))
        assert response.status_code == status
        if request is not None:
            assert request.stop.max_tokens == 1
        else:
            error = error_of(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert str(length + 1) in error["message"]
            assert "40" in error["message"]
    for field in ("max_tokens", "max_completion_tokens"):
        for wanted, status in ((29, 200), (30, 400)):
            body = {"prompt": "a" * 10, field: wanted}
            response, _ = await post("/v1/completions", body, ForcedVerifier(description=small))
            assert response.status_code == status
            if status == 400:
                error = error_of(response)
                assert (error["code"], error["param"]) == ("context_length_exceeded", field)
                assert all(number in error["message"] for number in ("30", "11", "40"))


async def test_bound_of_answers() -> None:
    for limits, expected in (({}, 512 - 3), ({"default_max_tokens": 5}, 5), ({"default_max_tokens": 5000}, 512 - 3)):
        _, request = await post("/v1/completions", PROMPT, **limits)
        assert request is not None
        assert request.stop.max_tokens == expected
    response, _ = await post("/v1/completions", {**PROMPT, "max_tokens": 5, "max_completion_tokens": 6})
    assert error_of(response)["param"] == "max_tokens"
    response, _ = await post("/v1/completions", {**PROMPT, "max_tokens": 5, "max_completion_tokens": 5})
    assert response.status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "other"}))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(PATHS)), st.dictionaries(NAMES, JSON, max_size=3), st.booleans())
async def test_no_body_is_the_servers_fault(path: str, fields: dict[str, Any], complete: bool) -> None:
    response, _ = await post(path, {**(PATHS[path] if complete else {}), **fields})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response, response.status_code)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
async def test_no_bytes_are_the_servers_fault(body: bytes) -> None:
    app = create_app(SingleFleet(ForcedVerifier(), 256), RouterSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        response = await client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error_of(response)


def documented_fields(heading: str) -> list[tuple[str, str]]:
    """Name and default of every row of the table under ``heading`` in the reference."""
    text = (Path(__file__).parents[2] / "docs/reference/http-api.md").read_text(encoding="utf-8")
    section = text.split(f"\n### {heading}\n")[1].split("\n### ")[0].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [(row[0].strip().strip("`"), row[2].strip()) for row in rows]


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Fields of both", set(ChatBody.model_fields) & set(CompletionBody.model_fields)),
        ("Fields of chats", set(ChatBody.model_fields) - set(CompletionBody.model_fields)),
        ("Fields of completions", set(CompletionBody.model_fields) - set(ChatBody.model_fields)),
        ("Fields of a message", set(Message.model_fields)),
    ],
)
def test_the_reference_names_every_field(heading: str, names: set[str]) -> None:
    documented = [name for name, _ in documented_fields(heading)]
    # ``logprobs`` differs between the two and stands in both tables.
    both = {"logprobs"} if heading != "Fields of a message" else set()
    expected = names - both if heading == "Fields of both" else names | both
    assert sorted(documented) == sorted(expected)


def test_the_reference_names_the_defaults() -> None:
    fields = {**ChatBody.model_fields, **CompletionBody.model_fields}
    for name, default in documented_fields("Fields of both"):
        value = fields[name].get_default(call_default_factory=True)
        if isinstance(value, bool | int | float) and default.startswith("`"):
            assert json.loads(default.strip("`")) == value, name
