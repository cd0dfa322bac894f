"""``eagle2 bench serve`` on a small trained pair, whose proposer is a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle2.cli import main
from eagle2.config import ModelSettings, Settings
from eagle2.errors import UnavailableError
from eagle2.evaluation.load.proposer_process import ProposerProcess
from fakes.checkpoints import questions_flags
from fakes.lossy import change_drafted_tokens

SENTENCES = ("our neighbour buys the red mirror ", "the old sailor ", "the queen follows the silver ")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    asked = questions_flags(tmp_path_factory.mktemp("bench"), SENTENCES)
    return [*asked, "--max-tokens", "12", "--answers", "2"]


@pytest.mark.slow
def test_three_settings_are_measured_under_both_kinds_of_load(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--concurrency", "1,3", "--rates", "20", "--arrivals", "4", "--fixed", "8/4/4", "--rounds", "2"]
    assert main(["bench", "serve", *flags, *options, "--adaptive", "6/3/4", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "round 2/2, 20 a second" in shown.err
    assert "have the same tokens, whatever the contender and load." in shown.out
    values = json.loads((tmp_path / "out" / "load.json").read_text())
    assert (tmp_path / "out" / "load.md").read_text() == shown.out
    assert values["lossless"] is True
    assert values["answers_compared"] > 20
    assert values["model"]["proposer"] == "process"

    cells = values["cells"]
    assert len(cells) == 2 * 3 * 3  # rounds, loads, contenders; the warm-up is not among them
    for cell in cells:
        at_once = cell["load"]["concurrency"]
        assert cell["tokens"] >= (24 if at_once else 1)
        assert cell["wall_s"] > 0
        assert cell["cpu_s"] > 0
        assert len(cell["first_token_s"]) == len(cell["late_s"]) == 4 or at_once
        assert (cell["drafted"] > 0) == (cell["contender"] == "fixed 8/4/4") or cell["contender"] == "adaptive"
        if cell["contender"] == "off":
            assert cell["tau"] == 1.0
        if cell["contender"] == "fixed 8/4/4":
            assert 1.0 < cell["tau"] <= 5.0
    first = [cell["contender"] for cell in cells[:3]]
    second = [cell["contender"] for cell in cells[3:6]]
    assert sorted(first) == sorted(second)
    assert first != second  # the next load begins with the next contender
    pairs = [(row["ours"], row["theirs"]) for row in values["ratios"]]
    assert pairs == [("adaptive", "off"), ("adaptive", "fixed 8/4/4")] * 3


def test_a_changed_token_fails(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change_drafted_tokens(monkeypatch)
    options = ["--concurrency", "1", "--settings", "off,fixed", "--fixed", "8/4/4", "--rounds", "1"]
    assert main(["bench", "serve", *flags, *options, "--proposer", "inline"]) == 1
    shown = capsys.readouterr().out
    assert "NOT LOSSLESS" in shown
    assert "| fixed 8/4/4 / off" in shown


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--settings", "off,best"], "'best' is no setting; there are off, fixed and adaptive."),
        (["--draft", "none"], "need a draft head, and --draft is none: ask for --settings off."),
        (["--concurrency", ""], "--concurrency and --rates are both empty."),
        (["--concurrency", "1,x"], "--concurrency is a list of numbers such as 1,2,4, not '1,x'."),
        (["--rates", "0"], "--rates has positive numbers, each once, not 0."),
        (["--adaptive", "8/4/4,4/4/4"], "--adaptive is one tree shape, not 8/4/4,4/4/4."),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    flags: list[str], options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags, *options]) == 1
    assert capsys.readouterr().err.strip().endswith(sentence)


@pytest.mark.slow
def test_a_proposer_that_cannot_start_is_not_waited_for() -> None:
    settings = Settings(model=ModelSettings(target="/nowhere"))
    with pytest.raises(UnavailableError, match="The proposer's process ended with status 1"):
        ProposerProcess(settings, "a fingerprint")
