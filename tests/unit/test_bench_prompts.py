"""The questions of a measurement: where they come from and which are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle2.errors import ConfigError, ModelError
from eagle2.evaluation import prompts as module
from eagle2.evaluation.prompts import Prompt, PromptEncoder, built_in_prompts, default_prompts, read_prompts, select
from fakes.verifier import describe


def test_the_built_in_questions_are_eight_of_eight_kinds() -> None:
    prompts = built_in_prompts().prompts
    assert len(prompts) == len({p.category for p in prompts}) == len({p.name for p in prompts}) == 8


def test_categories_are_taken_in_turn() -> None:
    prompts = [Prompt(f"{kind}{i}", kind, "?") for kind, count in (("a", 3), ("b", 1), ("c", 2)) for i in range(count)]
    assert [p.name for p in select(prompts, 4)] == ["a0", "b0", "c0", "a1"]
    assert [p.name for p in select(prompts, 99)] == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_first_turns_are_read_from_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text('{"question_id": 7, "category": "math", "turns": ["1+1?", "2+2?"]}\n\n{"prompt": "Hello"}\n')
    found = read_prompts(path)
    assert found.source == "asked.jsonl"
    assert found.prompts == (Prompt("asked/7", "math", "1+1?"), Prompt("asked/3", "", "Hello"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "has no questions"),
        ('{"prompt": "x"}\n{"question": "y"}\n', "Line 2 of .* is no question: it needs"),
        ("not json\n", "Line 1 of .* is no question: it needs"),
        ('{"turns": []}\n', "Line 1 of .* is no question: it needs"),
        ('{"prompt": 5}\n', "Line 1 of .* is no question: its text is 5"),
    ],
)
def test_a_file_that_has_none_is_refused(content: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        read_prompts(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl cannot be read"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_the_package_asks_its_own_questions_where_mt_bench_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mt_bench.jsonl"
    monkeypatch.setattr(module, "_QUESTIONS", path)
    assert default_prompts() == built_in_prompts()
    path.write_text('{"prompt": "x"}\n')
    assert default_prompts().source == "mt_bench.jsonl"


def test_prompts_become_ids_as_the_http_api_makes_them() -> None:
    encoder = PromptEncoder(describe())
    assert bytes(encoder.chat("Hi", "Be kind")) == b"[system]Be kind\n[user]Hi\n[assistant]"
    assert encoder.raw("Hi") == (256, *b"Hi")


def test_a_model_without_a_template_has_no_chat() -> None:
    encoder = PromptEncoder(describe(chat_template=None))
    assert not encoder.has_template
    with pytest.raises(ModelError, match="'tiny/bytes' has no chat template"):
        encoder.chat("Hi")
