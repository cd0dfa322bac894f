"""Tokenizers: the same ids and text as transformers, and errors that say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import processors

from eagle2.errors import ModelError, RequestError
from eagle2.models.tiny import BOS, EOS, TOKENIZER_SIZE, tiny_tokenizer, write_tiny_target
from eagle2.text.tokenizer import Tokenizer

TINY = Tokenizer(tiny_tokenizer().to_str())
# A busy machine is no failure.
unhurried = settings(deadline=None)


@unhurried
@given(st.text())
def test_text_survives_a_round_trip(text: str) -> None:
    ids = TINY.encode(text, add_special_tokens=False)
    # Special tokens written out in the text are special, as in transformers.
    assert TINY.decode(ids, skip_special_tokens=False) == text


def test_agrees_with_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_target(tmp_path / "target")
    ours, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("the other hand", " 2 ünïcode 你好 😀\n", f"{BOS}the{EOS}", ""):
        for add in (False, True):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add)
            for skip in (False, True):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_added_only_on_request() -> None:
    raw = tiny_tokenizer()
    raw.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, 0)])
    tokenizer = Tokenizer(raw.to_str())
    assert tokenizer.encode("the", add_special_tokens=True)[0] == 0
    assert 0 not in tokenizer.encode("the", add_special_tokens=False)


def test_sizes_and_ids() -> None:
    assert TINY.vocab_size == TOKENIZER_SIZE
    assert TINY.token_id(EOS) == 2
    assert TINY.token_id("<|unheard-of|>") is None
    assert TINY.special_ids == {0, 1, 2}
    assert not TINY.has_text(2)
    assert not TINY.has_text(TOKENIZER_SIZE)
    assert TINY.has_text(TOKENIZER_SIZE - 1)


def test_vocabulary_size_counts_up_to_the_largest_id() -> None:
    raw = RawTokenizer.from_str('{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 41}, "unk_token": "a"}}')
    assert Tokenizer(raw.to_str()).vocab_size == 42


def test_padding_and_truncation_of_training_are_off() -> None:
    raw = tiny_tokenizer()
    raw.enable_truncation(4)
    raw.enable_padding(length=9)
    assert Tokenizer(raw.to_str()).encode("abcdefg", add_special_tokens=True) == TINY.encode(
        "abcdefg", add_special_tokens=True
    )


@pytest.mark.parametrize(
    ("text", "where"), [("a\ud83d", "U+D83D at character 1"), ("\udc00b", "U+DC00 at character 0")]
)
def test_lone_surrogates_are_the_callers_fault(text: str, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        TINY.encode(text, add_special_tokens=False)
    assert where.replace(" at", ", at") in caught.value.message


def test_unreadable_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer cannot be read"):
        Tokenizer("{}")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
