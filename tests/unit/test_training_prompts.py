"""Files of prompts: the forms of a line, and what is said about a broken one before anything is computed."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from eagle2.models.tiny import write_tiny_target
from eagle2.training.data import ChatEncoder, DataError
from eagle2.training.prompts import read_prompts
from fakes.files import write_lines


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder.from_folder(write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=1))


def test_each_form_of_a_line_becomes_the_same_chat(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "the hen", "source": "ignored", "turns": ["not looked at"]},
        "",
        {"turns": ["is the ox in?", "and then?"]},
        {"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "who is there?"}]},
        {"conversations": [{"from": "human", "value": "in the end"}]},
    )
    prompts = read_prompts(path, encoder.prompt)
    assert [prompt.text for prompt in prompts] == ["the hen", "is the ox in?", "who is there?", "in the end"]
    text = "<|im_start|>user\nthe hen<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompts[0].ids) == encoder.tokenizer.encode(text, add_special_tokens=False)
    assert "be short" in encoder.tokenizer.decode(prompts[2].ids)


def test_a_prompt_that_stands_twice_is_asked_once(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = tmp_path / "p.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"prompt": "one"}\n{"prompt": "two"}\n{"turns": ["one"]}\n')
    assert [prompt.text for prompt in read_prompts(path, encoder.prompt)] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON list where an object is expected"),
        ({"text": "x"}, "none of prompt, turns, messages is there"),
        ({"prompt": 3}, "prompt must be a text that is not empty, not 3"),
        ({"prompt": " \n"}, "prompt must be a text that is not empty"),
        ({"turns": []}, "turns must be a list of texts"),
        ({"turns": "x"}, "turns must be a list of texts"),
        ({"turns": [None]}, "the first of turns must be a text"),
        ({"messages": []}, "the last of messages must be the user's"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last of messages must be the user's"),
        ({"messages": [{"role": "owl", "content": "x"}]}, "role 'owl'"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, encoder: ChatEncoder, line: object, sentence: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(DataError, match=r"p\.jsonl, line 2: ") as caught:
        read_prompts(path, encoder.prompt)
    assert sentence in str(caught.value)


def test_a_file_without_prompts_is_refused(tmp_path: Path, encoder: ChatEncoder) -> None:
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(write_lines(tmp_path / "p.jsonl", "", ""), encoder.prompt)
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl", encoder.prompt)
