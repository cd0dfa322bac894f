"""A chat over HTTP with the official client, and what a client that leaves sets free."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest

from e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_QUESTION = [{"role": "user", "content": "the rest in there"}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def _ask(client: openai.OpenAI, **options: object) -> openai.types.chat.ChatCompletion:
    name = client.models.list().data[0].id
    given = {"model": name, "messages": _QUESTION, "max_tokens": 24, "temperature": 0, "seed": 7, **options}
    return client.chat.completions.create(**given)  # type: ignore[call-overload,no-any-return]


def test_an_answer_comes_with_its_usage(client: openai.OpenAI) -> None:
    answer = _ask(client, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "seed": 11}])
def test_speculation_changes_nothing(client: openai.OpenAI, sampling: dict[str, float]) -> None:
    drafted, plain = (_ask(client, **sampling, extra_body={"speculation": on}) for on in (True, False))
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    assert drafted.usage is not None
    assert plain.usage is not None
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens
    details = plain.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    details = drafted.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) + (details.rejected_prediction_tokens or 0) > 0


def test_a_stream_says_what_the_answer_says(client: openai.OpenAI) -> None:
    whole = _ask(client)
    name = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=name,
        messages=_QUESTION,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_refusal_of_the_request_is_a_400_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _ask(client, temperature=-1)
    assert caught.value.param == "temperature"


def test_a_client_that_leaves_stops_its_decoding(server: Server, client: openai.OpenAI) -> None:
    name = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=name,
        messages=_QUESTION,  # type: ignore[arg-type]
        max_tokens=1500,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while (busy := _busy(server)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert busy == {}, "nothing runs, and no slot is held on either side"


def _busy(server: Server) -> dict[str, float]:
    names = ("eagle2_num_requests_running", "eagle2_router_requests_running", "eagle2_kv_slots_used")
    metrics = {name: value for name, value in server.metrics().items() if name.startswith(names)}
    assert len(metrics) == 4, f"running twice, slots of two sides: {metrics}"
    return {name: value for name, value in metrics.items() if value}
