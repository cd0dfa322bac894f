"""``eagle2 bench`` as tables of methods by tasks, on a small trained pair."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from eagle2.cli import main
from eagle2.evaluation.speed_cells import SpeedMeasurement
from eagle2.protocol import Commit, GenerationRequest
from eagle2.verifier.service import VerifierService
from fakes.checkpoints import golden_flags, write_golden_target
from fakes.lossy import change_drafted_tokens

SENTENCES = ("our neighbour buys the red mirror ", "the old sailor ", "the queen follows the silver ")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("bench")
    target = write_golden_target(folder / "target")
    data = folder / "data"
    data.mkdir()
    (data / "mt_bench.jsonl").write_text(json.dumps({"turns": [SENTENCES[0], "and the old king "]}) + "\n")
    (data / "qa.jsonl").write_text("".join(json.dumps({"prompt": sentence}) + "\n" for sentence in SENTENCES[1:]))
    return [*golden_flags(target), "--data", str(data), "--tasks", "mt_bench,qa", "--max-tokens", "24"]


@pytest.fixture(scope="module")
def whole(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All methods with one tree at both temperatures, whole trees, nothing timed."""
    out = tmp_path_factory.mktemp("whole")
    assert main(["bench", *flags, "--tau-only", "--shapes", "8/4/4", "--out", str(out)]) == 0
    return out


def _values(out: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((out / "tables.json").read_text())
    return values


def test_every_method_has_its_tau_and_the_tokens_of_plain_decoding(whole: Path) -> None:
    values = _values(whole)
    text = (whole / "tables.md").read_text()
    rows = {(row["temperature"], row["task"], row["method"]): row for row in values["tau"]}
    methods = ("plain", "eagle1", "eagle2", "no_value", "no_rerank", "neither")
    assert set(rows) == {(t, task, method) for t in (0.0, 1.0) for task in ("mt_bench", "qa") for method in methods}
    assert values["lossless"]
    # Two turns of one question and two questions of one turn, each by five methods at two temperatures.
    assert "All 40 answers that were drafted for have exactly the tokens of plain decoding." in text
    for (_, task, method), row in rows.items():
        assert row["answers"] == 2
        assert row["tau"] == 1.0 if method == "plain" else 1.0 < row["tau"] <= 5.0, (task, method)
        assert row["tau"] == pytest.approx(1 + sum(row["accepted_per_position"]))
    assert "### Tokens per cycle (tau): tree 8/4/4, temperature 1" in text
    assert "Times as fast" not in text
    assert values["static"]["visits"][0] > 0
    assert all(0 <= rate <= 1 for row in values["static"]["rates"] for rate in row)
    assert set(values["calibration"]) == {"0", "1"}
    assert values["calibration"]["0"]["trees"] > 0


def test_the_second_turn_follows_the_answer_to_the_first(whole: Path) -> None:
    turns = json.loads((whole / "parts" / "tau_t0_mt_bench_plain.json").read_text())["turns"]
    assert [(turn["question"], turn["number"]) for turn in turns] == [("mt_bench/1", 1), ("mt_bench/1", 2)]
    # The pair's template reads the last message alone.
    assert bytes(turns[1]["prompt_ids"][1:]) == b"and the old king "


def test_fast_goes_through_the_same_cycles(whole: Path, flags: list[str], tmp_path: Path) -> None:
    options = ["--tau-only", "--fast", "--shapes", "8/4/4", "--methods", "eagle2,eagle1", "--temperatures", "0"]
    assert main(["bench", *flags, *options, "--out", str(tmp_path)]) == 0

    def cycles(out: Path, cell: str) -> list[list[int]]:
        return [turn["commits"] for turn in json.loads((out / "parts" / f"tau_{cell}.json").read_text())["turns"]]

    for cell in ("t0_mt_bench_eagle2_8-4-4", "t0_qa_eagle2_8-4-4", "t0_qa_eagle1_8-4-4", "t0_qa_plain"):
        assert cycles(tmp_path, cell) == cycles(whole, cell)


def test_a_later_run_measures_only_what_is_missing(
    whole: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (whole / "tables.json").read_text()
    missing = whole / "parts" / "tau_t1_qa_no_rerank_8-4-4.json"
    kept = json.loads(missing.read_text())
    missing.unlink()
    asked: list[GenerationRequest] = []
    original = VerifierService.generate

    async def generate(self: VerifierService, request: GenerationRequest) -> AsyncIterator[Commit]:
        asked.append(request)
        async for commit in original(self, request):
            yield commit

    monkeypatch.setattr(VerifierService, "generate", generate)
    assert main(["bench", *flags, "--tau-only", "--shapes", "8/4/4", "--out", str(whole)]) == 0
    assert [request.request_id for request in asked] == ["qa/1", "qa/2"]
    assert {request.sampling.temperature for request in asked} == {1.0}
    again = json.loads(missing.read_text())
    assert again["turns"] == kept["turns"]
    assert {json.dumps(row) for row in _values(whole)["tau"]} == {json.dumps(row) for row in json.loads(before)["tau"]}
    # Another length of answers is another measurement.
    assert main(["bench", *flags, "--tau-only", "--out", str(whole), "--max-tokens", "9"]) == 1
    assert "holds results with max_tokens = 24, and this run has 9" in capsys.readouterr().err


def test_methods_are_timed_beside_plain_decoding(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--methods", "eagle2", "--speed-methods", "eagle2,no_rerank", "--shapes", "8/4/4,2/1/2", "--fast"]
    options += ["--temperatures", "0", "--rounds", "2", "--speed-limit", "1", "--out", str(tmp_path)]
    assert main(["bench", *flags, *options]) == 0
    rows = _values(tmp_path)["speed"]
    assert [(row["task"], row["method"], row["tree"]) for row in rows] == [
        (task, method, tree)
        for tree in ("8/4/4", "2/1/2")
        for task in ("mt_bench", "qa")
        for method in ("eagle2", "no_rerank")
    ]
    # One question of two turns, one of one turn, two rounds each.
    assert [row["answers"] for row in rows] == [4, 4, 2, 2] * 2
    for row in rows:
        assert len(row["decode_rates"]) == len(row["plain_decode_rates"]) == 2
        assert row["times_plain"] > 0
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "tables.md").read_text()
    assert "### Times as fast as plain decoding: tree 2/1/2, temperature 0" in shown


def test_a_changed_token_fails(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change_drafted_tokens(monkeypatch)
    options = ["--tau-only", "--methods", "no_value", "--shapes", "2/1/2", "--temperatures", "0", "--limit", "1"]
    assert main(["bench", *flags, *options]) == 1
    assert "no_value with tree 2/1/2 on mt_bench/1 at temperature 0, at position 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--temperatures", "warm"], "'warm' is no list of temperatures"),
        (["--temperatures", "0,3"], "Temperatures lie between 0 and 2 and are named once, not 0,3."),
        (["--temperatures", "1,1"], "named once, not 1,1."),
        (["--methods", "eagle9"], "'eagle9' is no method"),
        (["--tasks", "chess"], "'chess' is no task"),
        (["--prompts", "x.jsonl"], "--prompts is a question set of its own"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(
    options: list[str], sentence: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags, *options]) == 1
    shown = capsys.readouterr().err
    assert sentence in shown
    assert "Loading" not in shown


def test_whoever_stops_early_has_what_was_measured(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: SpeedMeasurement, runner: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SpeedMeasurement, "run", interrupted)
    options = ["--fast", "--methods", "eagle2", "--shapes", "2/1/2", "--temperatures", "0", "--limit", "1"]
    assert main(["bench", *flags, *options, "--out", str(tmp_path)]) == 130
    shown = capsys.readouterr()
    assert "Interrupted: this is what was measured so far." in shown.err
    assert "### Tokens per cycle (tau): tree 2/1/2, temperature 0" in shown.out
    assert {row["method"] for row in _values(tmp_path)["tau"]} == {"plain", "eagle2"}
