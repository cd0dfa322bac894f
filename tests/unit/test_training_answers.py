"""Answers of the target: the same whatever the batch is, as plain decoding gives them, and resumed after a kill."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle2.config import ModelSettings
from eagle2.engine.assemble import Checkpoint, load_checkpoint
from eagle2.engine.batch import RowsBuilder
from eagle2.errors import ConfigError
from eagle2.kv_cache.slots import SlotPool, SlotTable
from eagle2.models.target import TargetModel
from eagle2.models.tiny import write_tiny_target
from eagle2.training.answers import AnswerSettings, answer_prompts
from eagle2.training.data import ChatEncoder, DataError, read_examples
from eagle2.training.decoder import BatchDecoder, Task, inverted
from eagle2.training.prompts import Prompt

SETTINGS = AnswerSettings(temperatures=(0.0, 0.8), max_tokens=12, max_prompt_tokens=60, seed=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_tiny_target(tmp_path_factory.mktemp("target"), max_position_embeddings=256)
    return load_checkpoint(ModelSettings(target=str(folder), draft=None, dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[Prompt]:
    encoder = ChatEncoder.from_folder(checkpoint.folder)
    texts = [f"{'the hen and the ox ' * (8 if i % 3 == 2 else i % 3)}number {i}" for i in range(20)]
    return [Prompt(text, tuple(encoder.prompt([{"role": "user", "content": text}]))) for text in texts]


def read(path: Path) -> dict[str, dict[str, Any]]:
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {entry["prompt"]: entry for entry in entries}


def greedy(checkpoint: Checkpoint, ids: tuple[int, ...], count: int) -> list[int]:
    """One token after the other, each from the whole text anew."""
    model = TargetModel(checkpoint.config, checkpoint.weights, dtype=torch.float32, max_positions=256)
    tokens = list(ids)
    while len(tokens) < len(ids) + count:
        pool = SlotPool(256)
        table = SlotTable(pool)
        table.extend(len(tokens))
        builder = RowsBuilder()
        builder.add_span(table.slots, 0, tokens)
        features = model.forward(builder.build(model.device), model.new_pool(256))
        tokens.append(int(model.logits(features[-1:])[0, : checkpoint.vocab_size].argmax()))
        if tokens[-1] in checkpoint.config.eos_token_ids:
            break
    return tokens[len(ids) :]


def test_greedy_answers_are_those_of_plain_decoding(
    tmp_path: Path, checkpoint: Checkpoint, prompts: list[Prompt]
) -> None:
    settings = AnswerSettings(temperatures=(0.0,), max_tokens=6, max_prompt_tokens=200)
    answer_prompts(checkpoint, prompts[:4], tmp_path / "a.jsonl", settings, sequences=3)
    for prompt in prompts[:4]:
        assert read(tmp_path / "a.jsonl")[prompt.text]["response_ids"] == greedy(checkpoint, prompt.ids, 6)


@pytest.mark.parametrize("sequences", [1, 5, 64])
def test_answers_do_not_depend_on_the_batch(
    tmp_path: Path, checkpoint: Checkpoint, prompts: list[Prompt], sequences: int
) -> None:
    reports: list[tuple[float, float]] = []
    count = answer_prompts(
        checkpoint, prompts, tmp_path / "a.jsonl", SETTINGS, sequences=sequences,
        report=lambda done, total, note: reports.append((done, total)),
    )  # fmt: skip
    answer_prompts(checkpoint, prompts[::-1], tmp_path / "b.jsonl", SETTINGS, sequences=7)
    answers = read(tmp_path / "a.jsonl")
    assert answers == read(tmp_path / "b.jsonl")
    assert set(answers) == {prompt.text for prompt in prompts if len(prompt.ids) <= 60}
    assert count.answered == len(answers) > 5
    assert count.too_long == len(prompts) - len(answers) > 0
    assert reports == [(done, len(answers)) for done in range(len(answers) + 1)]
    assert {entry["temperature"] for entry in answers.values()} == {0.0, 0.8}


def test_lines_are_what_training_reads(tmp_path: Path, checkpoint: Checkpoint, prompts: list[Prompt]) -> None:
    path = tmp_path / "a.jsonl"
    answer_prompts(checkpoint, prompts, path, SETTINGS)
    eos = set(checkpoint.config.eos_token_ids)
    for entry in read(path).values():
        assert 1 <= len(entry["response_ids"]) <= 12
        assert not eos & set(entry["response_ids"][:-1])
        assert (entry["finish"] == "stop") == (entry["response_ids"][-1] in eos)
        assert entry["response"] == checkpoint.tokenizer.decode(entry["response_ids"])

    def no_encoder() -> ChatEncoder:
        raise AssertionError("token ids need no tokenizer")

    examples = read_examples(path, checkpoint.config.vocab_size, no_encoder)
    assert sorted(len(example) for example in examples) == sorted(
        len(entry["prompt_ids"]) + len(entry["response_ids"]) for entry in read(path).values()
    )


@pytest.mark.parametrize("torn", [b"", b'{"prompt": "number', b'{"prompt": "x", "prompt_ids": [1, 2]}'])
def test_a_killed_run_goes_on(tmp_path: Path, checkpoint: Checkpoint, prompts: list[Prompt], torn: bytes) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    answer_prompts(checkpoint, prompts, whole, SETTINGS)

    def kill(done: float, total: float, note: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_prompts(checkpoint, prompts, killed, SETTINGS, report=kill)
    kept = killed.read_bytes()
    assert kept.count(b"\n") == 4
    killed.write_bytes(kept + torn)
    first: list[float] = []
    answer_prompts(checkpoint, prompts, killed, SETTINGS, report=lambda done, total, note: first.append(done))
    assert first[0] == 4
    assert killed.read_bytes().startswith(kept)
    assert len(killed.read_text().splitlines()) == len(read(killed))
    assert read(killed) == read(whole)


def test_another_target_or_setting_is_refused(tmp_path: Path, checkpoint: Checkpoint, prompts: list[Prompt]) -> None:
    path = tmp_path / "a.jsonl"
    answer_prompts(checkpoint, prompts[:2], path, SETTINGS)
    before = path.read_bytes()
    other = AnswerSettings(temperatures=(0.0, 0.8), max_tokens=13, max_prompt_tokens=60, seed=3)
    with pytest.raises(ConfigError, match="was made with max_tokens 12, now it is 13"):
        answer_prompts(checkpoint, prompts, path, other)
    folder = write_tiny_target(tmp_path / "other", seed=1, max_position_embeddings=256)
    another = load_checkpoint(ModelSettings(target=str(folder), draft=None, dtype="float32", device="cpu"))
    with pytest.raises(ConfigError, match="was made with"):
        answer_prompts(another, prompts, path, SETTINGS)
    (tmp_path / "a.jsonl.settings.json").unlink()
    with pytest.raises(ConfigError, match="does not say how it was made"):
        answer_prompts(checkpoint, prompts, path, SETTINGS)
    assert path.read_bytes() == before


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, checkpoint: Checkpoint, prompts: list[Prompt]) -> None:
    path = tmp_path / "a.jsonl"
    answer_prompts(checkpoint, prompts[:2], path, SETTINGS)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"half\n" + second)
    with pytest.raises(DataError, match="line 2"):
        answer_prompts(checkpoint, prompts, path, SETTINGS)
    assert path.read_bytes() == first + b"half\n" + second


def test_two_writers_at_once_are_refused(tmp_path: Path, checkpoint: Checkpoint, prompts: list[Prompt]) -> None:
    path = tmp_path / "a.jsonl"

    def again(done: float, total: float, note: str) -> None:
        with pytest.raises(ConfigError, match="is being written by another process"):
            answer_prompts(checkpoint, prompts[:1], path, SETTINGS)

    answer_prompts(checkpoint, prompts[:1], path, SETTINGS, report=again)
    assert len(read(path)) == 1


def test_few_slots_only_make_the_batch_smaller(checkpoint: Checkpoint, prompts: list[Prompt]) -> None:
    tasks = [SETTINGS.task(prompt) for prompt in prompts]
    need = max(len(task.prompt_ids) for task in tasks) + 12
    wide = {done.task: done for done in BatchDecoder(checkpoint, sequences=9, slots=9 * need).run(tasks)}
    narrow = {done.task: done for done in BatchDecoder(checkpoint, sequences=9, slots=need).run(tasks)}
    assert wide == narrow
    assert len(wide) == len(tasks)


def test_a_draw_follows_the_softmax_at_its_temperature(checkpoint: Checkpoint) -> None:
    """First tokens of many draws against the target's own distribution: chi-squared over its likeliest tokens."""
    ids, temperature, draws = (5, 80, 99), 0.7, 4000
    tasks = [Task(ids, 1, temperature, str(i)) for i in range(draws)]
    decoder = BatchDecoder(checkpoint, sequences=500, slots=2000)
    counts = Counter(done.output_ids[0] for done in decoder.run(tasks))
    model = TargetModel(checkpoint.config, checkpoint.weights, dtype=torch.float32, max_positions=256)
    builder = RowsBuilder()
    table = SlotTable(SlotPool(8))
    table.extend(3)
    builder.add_span(table.slots, 0, ids)
    logits = model.logits(model.forward(builder.build(model.device), model.new_pool(8))[-1:])[
        0, : checkpoint.vocab_size
    ]
    expected = (logits / temperature).softmax(0) * draws
    often = [i for i in range(checkpoint.vocab_size) if expected[i] >= 5]
    assert len(often) > 5
    rest = draws - float(expected[often].sum())
    statistic = sum((counts[i] - float(expected[i])) ** 2 / float(expected[i]) for i in often)
    statistic += (draws - sum(counts[i] for i in often) - rest) ** 2 / max(rest, 1.0)
    freedom = len(often)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1"),
        ({"temperatures": ()}, "temperatures must be numbers from 0 on"),
        ({"temperatures": (-0.1,)}, "temperatures must be numbers from 0 on"),
    ],
)
def test_settings_that_cannot_be_used(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        AnswerSettings(**values)


def test_no_room_for_a_prompt(tmp_path: Path, checkpoint: Checkpoint, prompts: list[Prompt]) -> None:
    with pytest.raises(ConfigError, match="leave no room for a prompt"):
        answer_prompts(checkpoint, prompts, tmp_path / "a.jsonl", AnswerSettings(max_tokens=256))
    assert not (tmp_path / "a.jsonl").exists()


def test_a_draw_falls_where_the_running_sum_passes_it() -> None:
    """Against a running sum over the whole vocabulary, with weightless tokens and a short last block."""
    weights = torch.tensor([1.0, 0.0, 3.0, 0.0]).repeat(150)[:599].expand(6, -1).contiguous()
    shares = torch.tensor([0.0, 1 / 600, 0.25, 0.5, 0.73, 1 - 2**-53], dtype=torch.float64)
    total = weights[0].double().sum()
    expected = [int((weights[0].double().cumsum(0) <= share * total).sum()) for share in shares]
    assert inverted(weights, shares).tolist() == expected
    assert expected[0] == 0
    assert expected[-1] == 598
