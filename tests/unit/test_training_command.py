"""``eagle2 train`` from a data file to a head that fits its target."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from eagle2.models.architecture import DraftConfig, TargetConfig
from eagle2.models.checkpoint import check_head, load_tensors
from eagle2.models.draft_vocabulary import DraftVocabulary
from eagle2.models.tiny import write_tiny_head, write_tiny_target
from eagle2.training import command
from eagle2.training import run as run_module
from eagle2.training.held_out import HeldOut
from eagle2.training.lock import locked


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), hidden_size=32, num_layers=1, head_dim=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    draw = random.Random(0)
    words = ["the", "hen", "is", "here", "and", "there", "one", "more"]
    with path.open("w") as file:
        for _ in range(40):
            text = " ".join(draw.choices(words, k=6))
            file.write(json.dumps({"prompt": text, "response": text + " " + text}) + "\n")
    return path


def arguments(*options: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([str(option) for option in options])


def options(target: Path, data: Path, out: Path) -> list[object]:
    return [
        *("--target", target, "--data", data, "--out", out, "--epochs", 3, "--batch-tokens", 400, "--holdout", 4),
        *("--max-length", 256, "--vocab-subset", 100, "--threads", 1, "--dtype", "float32", "--lr", 0.003),
        *("--optimizer", "adamw", "--questions", 2, "--question-tokens", 8),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_writes_a_head_that_fits(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    out = tmp_path / "head"
    assert command.run(arguments(*options(target, data, out), "--dtype", dtype)) == 0
    tensors, config = load_tensors(out), DraftConfig.from_folder(out)
    check_head(config, tensors, TargetConfig.from_folder(target))
    assert config.max_position_embeddings == 256
    card = (out / "README.md").read_text()
    assert "36 conversations" in card
    assert "4 more were held out" in card
    said = capsys.readouterr().err
    assert said.count("with tree 60/6/10") == 3, "the engine measured each epoch"
    assert "tokens a cycle on held-out prompts" in card
    history = [json.loads(line) for line in (tmp_path / "head.work" / "history.jsonl").read_text().splitlines()]
    assert len(history) == 3
    assert history[-1]["held_out_regression"] < history[0]["held_out_regression"]
    assert all(1 <= entry["tau"] <= 7 for entry in history)
    assert json.loads((tmp_path / "head.work" / "losses.jsonl").read_text().splitlines()[-1])["progress"] == 1
    assert (out / "training.png").stat().st_size > 0
    table = DraftVocabulary.load(out, TargetConfig.from_folder(target).vocab_size)
    assert table is not None
    assert int(table.counts.sum()) > 36 * 6


def test_a_stopped_run_is_resumed_only_when_asked_and_ends_the_same(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.run(arguments(*options(target, data, tmp_path / "whole"))) == 0
    stopped = options(target, data, tmp_path / "stopped")
    seen = 0

    def interrupt(report: object) -> str:
        nonlocal seen
        seen += 1
        if seen == 6:
            raise KeyboardInterrupt
        return ""

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_note", interrupt)
        assert command.run(arguments(*stopped)) == 130
    assert "--resume" in capsys.readouterr().err
    assert command.run(arguments(*stopped)) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert command.run(arguments(*stopped, "--resume")) == 0
    whole, resumed = load_tensors(tmp_path / "whole"), load_tensors(tmp_path / "stopped")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_run_that_was_killed_while_it_measured_last_measures_then(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [*options(target, data, tmp_path / "head"), "--epochs", 1]

    def interrupt(*_: object) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HeldOut, "tau", interrupt)
        assert command.run(arguments(*short)) == 130
    assert not (tmp_path / "head").exists()
    assert command.run(arguments(*short, "--resume")) == 0
    assert (tmp_path / "head" / "model.safetensors").is_file()


def test_two_runs_do_not_share_a_work_folder(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path / "head.work"):
        assert command.run(arguments(*options(target, data, tmp_path / "head"))) == 2
    assert f"is in use by process {os.getpid()}" in capsys.readouterr().err


def test_it_goes_on_from_a_head_of_the_same_shape_only(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(arguments(*options(target, data, tmp_path / "first"), "--epochs", 1)) == 0
    further = [*options(target, data, tmp_path / "second"), "--epochs", 1, "--init", tmp_path / "first"]
    assert command.run(arguments(*further, "--lr", 1e-9)) == 0
    first, second = load_tensors(tmp_path / "first"), load_tensors(tmp_path / "second")
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    other = write_tiny_head(tmp_path / "other", target, bias=True)
    assert command.run(arguments(*options(target, data, tmp_path / "third"), "--init", other)) == 2
    assert "is no head to go on from: fc.bias is (32,) there, absent here." in capsys.readouterr().err


def asking(target: Path, prompts: Path, out: Path) -> list[object]:
    return [
        *("--target", target, "--prompts", prompts, "--out", out, "--epochs", 1, "--batch-tokens", 400),
        *("--max-length", 256, "--vocab-subset", 100, "--threads", 1, "--dtype", "float32", "--questions", 0),
        *("--answer-tokens", 8, "--temperatures", 0, 0.8),
    ]


def test_the_target_answers_prompts_once_and_is_trained_on_what_it_said(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the hen is {n}"}) + "\n" for n in range(12)))
    with monkeypatch.context() as patch:
        # Killed right behind the answers: the second part has them.
        patch.setattr(run_module, "read_examples", Mock(side_effect=KeyboardInterrupt))
        assert command.run(arguments(*asking(target, prompts, tmp_path / "head"))) == 130
    answers = (tmp_path / "head.work" / "answers.jsonl").read_bytes()
    assert command.run(arguments(*asking(target, prompts, tmp_path / "head"), "--resume")) == 0
    assert (tmp_path / "head.work" / "answers.jsonl").read_bytes() == answers
    entries = [json.loads(line) for line in answers.splitlines()]
    assert sorted(entry["prompt"] for entry in entries) == sorted(f"the hen is {n}" for n in range(12))
    assert {entry["temperature"] for entry in entries} == {0.0, 0.8}
    assert all(1 <= len(entry["response_ids"]) <= 8 for entry in entries)
    assert "prompts.jsonl, 11 conversations" in (tmp_path / "head" / "README.md").read_text()


def test_a_broken_prompt_is_refused_by_line_before_any_is_answered(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the hen"}\n\n{"prompt": ["the", "hen"]}\n')
    assert command.run(arguments(*asking(target, prompts, tmp_path / "head"))) == 2
    assert f"{prompts}, line 3: prompt must be a text" in capsys.readouterr().err
    assert not (tmp_path / "head.work" / "answers.jsonl").exists()


def test_broken_data_is_refused_before_the_target_answers_anything(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, broken = tmp_path / "prompts.jsonl", tmp_path / "broken.jsonl"
    prompts.write_text('{"prompt": "the hen"}\n')
    broken.write_text('{"prompt": "the hen"\n')
    assert command.run(arguments(*asking(target, prompts, tmp_path / "head"), "--data", broken)) == 2
    assert f"{broken}, line 1: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "head.work" / "answers.jsonl").exists()


def test_something_must_be_named_to_train_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.run(arguments("--out", tmp_path / "head")) == 2
    assert "nothing to train on" in capsys.readouterr().err


def test_a_broken_file_is_refused_by_line_before_anything_is_written(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("".join(data.read_text().splitlines(keepends=True)[:11]) + '{"prompt": 7, "response": "x"}\n')
    assert command.run(arguments(*options(target, broken, tmp_path / "head"))) == 2
    assert f"{broken}, line 12: prompt must be a text, not 7." in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


def test_what_cannot_be_done_is_said_in_one_sentence(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:3]))
    assert command.run(arguments(*options(target, few, tmp_path / "head"))) == 2
    assert "has 3 examples; training needs 10" in capsys.readouterr().err
    assert command.run(arguments(*options(target, data, tmp_path / "other"), "--resume")) == 2
    assert "holds no run to resume" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "model.safetensors").touch()
    assert command.run(arguments(*options(target, data, tmp_path / "taken"))) == 2
    assert "holds a head already" in capsys.readouterr().err
    assert command.run(arguments(*options(tmp_path / "nowhere", data, tmp_path / "head"))) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [("--lr", "0"), ("--lr", "nan"), ("--epochs", "0"), ("--rollout-from", "1.5"), ("--noise", "-1")]
)
def test_values_out_of_range_are_refused(option: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        arguments("--data", "x", "--out", "y", *option)
