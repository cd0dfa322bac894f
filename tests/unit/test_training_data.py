"""Data files: three ways to write a conversation, and what is said about a broken line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from eagle2.models.tiny import write_tiny_target
from eagle2.training.batches import epoch_order, make_batch
from eagle2.training.data import ChatEncoder, DataError, read_examples
from eagle2.training.vocabulary import answer_frequencies
from fakes.files import write_lines


def no_encoder() -> ChatEncoder:
    raise AssertionError("token ids need no tokenizer")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder.from_folder(write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=1))


def test_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"prompt": "ignored", "prompt_ids": [5, 6, 7], "response_ids": [8, 9]}\n\n')
        file.write('{"prompt_ids": [1], "response_ids": [2]}\n')
    examples = read_examples(path, 10, no_encoder)
    assert [list(example.ids) for example in examples] == [[5, 6, 7, 8, 9], [1, 2]]
    assert [example.spans for example in examples] == [((3, 5),), ((1, 2),)]
    assert examples[0].num_answer_tokens == 2


def test_text_is_encoded_as_in_a_chat(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = write_lines(tmp_path / "data.jsonl", {"prompt": "the hen", "response": "is here"})
    (example,) = read_examples(path, 1000, lambda: encoder)
    prompt = encoder.tokenizer.encode(
        "<|im_start|>user\nthe hen<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    answer = encoder.tokenizer.encode("is here<|im_end|>", add_special_tokens=False)
    assert list(example.ids) == prompt + answer
    assert example.spans == ((len(prompt), len(prompt) + len(answer)),)


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_every_assistant_turn_is_trained_on(tmp_path: Path, encoder: ChatEncoder, key: str) -> None:
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    sharegpt = {"user": "human", "assistant": "gpt"}
    messages = [
        {"role": role, "content": text} if key == "messages" else {"from": sharegpt[role], "value": text}
        for role, text in turns
    ]
    (example,) = read_examples(write_lines(tmp_path / "data.jsonl", {key: messages}), 1000, lambda: encoder)
    texts = [encoder.tokenizer.decode([int(i) for i in example.ids[a:b]]) for a, b in example.spans]
    assert texts == ["two", "four"]
    assert [int(example.ids[stop - 1]) for _, stop in example.spans] == [encoder.tokenizer.token_id("<|im_end|>")] * 2


GOOD = {"prompt_ids": [1, 2], "response_ids": [3]}


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ('{"prompt_ids": [1, 2], "respon', "not JSON"),
        ("[1, 2]", "a JSON list where an object is expected"),
        ({"text": "x"}, "none of prompt_ids"),
        ({"prompt_ids": [1]}, "response_ids must be a list of token ids"),
        ({"prompt_ids": [1], "response_ids": []}, "response_ids is empty"),
        ({"prompt_ids": [1], "response_ids": [2, "3"]}, "response_ids must be a list of token ids"),
        ({"prompt_ids": [1], "response_ids": [True]}, "response_ids must be a list of token ids"),
        ({"prompt_ids": [1], "response_ids": [10]}, "token id 10 is not in the target's vocabulary of 10"),
        ({"prompt_ids": [-4], "response_ids": [1]}, "token id -4 is not in the target's vocabulary of 10"),
        ({"prompt_ids": [2**40], "response_ids": [1]}, f"token id {2**40}"),
        ({"prompt": "x", "response": None}, "response must be a text, not None"),
        ({"messages": "x"}, "messages must be a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message has the role 'assistant'"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, encoder: ChatEncoder, broken: object, says: str) -> None:
    path = write_lines(tmp_path / "data.jsonl", GOOD, "", GOOD, broken, GOOD)
    with pytest.raises(DataError) as caught:
        read_examples(path, 10, lambda: encoder)
    assert str(caught.value).startswith(f"{path}, line 4: ")
    assert says in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        read_examples(path, 10, no_encoder)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    whole = gzip.compress(
        "".join(json.dumps({"prompt_ids": [i], "response_ids": [i]}) + "\n" for i in range(9)).encode()
    )
    path.write_bytes(whole[:-12])
    with pytest.raises(DataError, match=str(path)):
        read_examples(path, 10, no_encoder)
    with pytest.raises(DataError, match="No such file"):
        read_examples(tmp_path / "absent.jsonl", 10, no_encoder)


def test_long_examples_are_cut_and_answers_beyond_the_cut_dropped(tmp_path: Path) -> None:
    lines = [{"prompt_ids": [1] * 6, "response_ids": [2] * 4}, {"prompt_ids": [1] * 8, "response_ids": [2]}]
    (example,) = read_examples(write_lines(tmp_path / "data.jsonl", *lines), 10, no_encoder, max_length=8)
    assert len(example) == 8
    assert example.spans == ((6, 8),)
    with pytest.raises(DataError, match="no example"):
        read_examples(tmp_path / "data.jsonl", 10, no_encoder, max_length=5)


def test_the_most_frequent_answer_tokens_are_found(tmp_path: Path) -> None:
    lines = [{"prompt_ids": [7, 7, 7, 7], "response_ids": [2, 5, 5]}, {"prompt_ids": [7], "response_ids": [5, 2, 9]}]
    examples = read_examples(write_lines(tmp_path / "data.jsonl", *lines), 10, no_encoder)
    table = answer_frequencies(examples, 10)
    ids = table.most_frequent(2)
    assert ids.tolist() == [2, 5]
    assert table.coverage(ids) == pytest.approx(5 / 6)
    assert table.most_frequent(100).tolist() == [2, 5, 9], "what was never written has no place"


def test_batches_hold_every_example_once_and_stay_within_the_limit() -> None:
    lengths = [3 + (i * 7) % 40 for i in range(500)]
    order = epoch_order(lengths, range(500), 200, seed=1)
    assert sorted(i for batch in order for i in batch) == list(range(500))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 200 for batch in order)
    assert max(len(batch) for batch in order) == 6, "32 rows each"
    assert order == epoch_order(lengths, range(500), 200, seed=1)
    assert order != epoch_order(lengths, range(500), 200, seed=2)
    assert epoch_order([500], [0], 100, seed=0) == [[0]]


def test_a_batch_pairs_each_feature_with_the_next_token(tmp_path: Path) -> None:
    import torch

    lines = [{"prompt_ids": [1, 2], "response_ids": [3, 4]}, {"prompt_ids": [5], "response_ids": [6]}]
    examples = read_examples(write_lines(tmp_path / "data.jsonl", *lines), 10, no_encoder)
    features = [torch.arange(len(example)).float()[:, None] + 10 * i for i, example in enumerate(examples)]
    batch = make_batch(examples, [0, 1], features.__getitem__)
    assert batch.next_ids.shape == (2, 32)
    assert not batch.answer[:, 3:].any()
    assert batch.next_ids[:, :3].tolist() == [[2, 3, 4], [6, 0, 0]]
    assert batch.features[:, :3, 0].tolist() == [[0, 1, 2], [10, 0, 0]]
    assert batch.targets[:, :3, 0].tolist() == [[1, 2, 3], [11, 0, 0]]
    assert batch.answer[:, :3].tolist() == [[False, True, True], [True, False, False]]
    assert batch.lengths.tolist() == [3, 1]
    assert batch.counted(1)[:, :3].tolist() == [[False, False, True], [False, False, False]]
