"""What is refused before it is parsed or tokenised, and that nothing else is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.errors import RequestError
from eagle2.router.body import parse_body
from eagle2.router.model import ServedModel
from eagle2.router.prompt_length import refuse_long_text
from eagle2.router.schemas import ChatBody, CompletionBody
from eagle2.text.tokenizer import Tokenizer
from fakes.verifier import byte_tokenizer_json, describe

TOKENIZER = Tokenizer(byte_tokenizer_json())
MODEL = ServedModel.load(describe())


def merged_tokenizer() -> Tokenizer:
    """Up to 16 ``a`` are one token, so that cuts change how a text is split."""
    raw = json.loads(byte_tokenizer_json())
    vocab, merges = raw["model"]["vocab"], []
    for length in (1, 2, 4, 8):
        merges.append(["a" * length, "a" * length])
        vocab["a" * 2 * length] = len(vocab) + 2
    raw["model"]["merges"] = merges
    return Tokenizer(json.dumps(raw))


MERGED = merged_tokenizer()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4000), st.integers(0, 40), st.sampled_from(["a", "ab", "\u6f22", " ", "aaaaaaaaaaab"]))
def test_only_texts_that_are_too_long_are_refused_early(most: int, thousands: int, unit: str) -> None:
    text = unit * (thousands * 1000 // len(unit))
    for tokenizer in (TOKENIZER, MERGED):
        tokens = len(tokenizer.encode(text, add_special_tokens=False))
        refusal = None
        try:
            refuse_long_text(tokenizer, text, most, "prompt")
        except RequestError as error:
            refusal = error
        if refusal is None:
            assert tokens <= 8 * most
        else:
            assert tokens > most
            assert str(most) in refusal.message
            assert (refusal.param, refusal.code, refusal.status) == ("prompt", "context_length_exceeded", 400)


def test_most_of_a_long_text_is_never_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        nonlocal read
        read += len(text)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    text = "hello world " * 300_000
    for body in (
        CompletionBody.model_validate({"prompt": text}),
        ChatBody.model_validate({"messages": [{"role": "user", "content": text}]}),
    ):
        read = 0
        with pytest.raises(RequestError, match="the most are 8192"):
            MODEL.prompt_ids(body, 8192)
        assert 16_384 < read < 32_768


@pytest.mark.parametrize("prompt", ["a" * 101, [1] * 101, [10**9] * 101, "a" * 100_000])
def test_both_numbers_are_named(prompt: str | list[int]) -> None:
    with pytest.raises(RequestError, match=r"101|102|8192") as caught:
        MODEL.prompt_ids(CompletionBody.model_validate({"prompt": prompt}), 100)
    assert caught.value.code == "context_length_exceeded"
    assert "the most are 100" in caught.value.message


def test_a_prompt_as_long_as_allowed() -> None:
    assert len(MODEL.prompt_ids(CompletionBody.model_validate({"prompt": "a" * 99}), 100)) == 100
    assert len(MODEL.prompt_ids(CompletionBody.model_validate({"prompt": [1] * 100}), 100)) == 100


HOSTILE = {
    "lists": b'{"prompt":"x","foo":[' + b",".join([b"[]"] * 300_000) + b"]}",
    "objects": b'{"prompt":"x","foo":[' + b",".join([b'{"a":1}'] * 200_000) + b"]}",
    "strings": b'{"prompt":"x","stop":[' + b",".join([b'"a"'] * 200_000) + b"]}",
    "ids": b'{"prompt":[' + b",".join([b"1"] * 200_000) + b"]}",
    "keys": b'{"prompt":"x","metadata":{' + b",".join(b'"%d":""' % i for i in range(200_000)) + b"}}",
    "quotes": b'"' * 400_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_too_many_values_are_not_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(RequestError, match="too many values") as caught:
        parse_body(CompletionBody, HOSTILE[name])
    assert caught.value.code == "too_many_values"


@pytest.mark.parametrize("unit", ['"', "[],", "{", '\\"', "\\", '"\\"', '\\\\"'])
def test_marks_within_a_prompt_do_not_count(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    assert parse_body(CompletionBody, json.dumps({"prompt": text}).encode()).prompt == text


@pytest.mark.parametrize("tail", ['"', "", "\\", '\\"'])
def test_a_string_that_never_ends_takes_no_time(tail: str) -> None:
    """Looking for its end once again at every quote would take hours."""
    body = ('{"prompt":"' + '\\"' * 1_000_000 + tail).encode()
    with pytest.raises(RequestError, match="no JSON"):
        parse_body(CompletionBody, body)


def test_as_many_ids_as_operators_may_allow() -> None:
    assert len(parse_body(CompletionBody, json.dumps({"prompt": [1] * 131_072}).encode()).prompt) == 131_072
