"""Tables from recorded results, and a folder that a later run goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle2.errors import ConfigError
from eagle2.evaluation.acceptance import Acceptance, Cell
from eagle2.evaluation.conversation import Turn
from eagle2.evaluation.measure import Generation
from eagle2.evaluation.methods import DRAFTING, parse_methods
from eagle2.evaluation.results import Results
from eagle2.evaluation.speed import Run
from eagle2.evaluation.speed_cells import race_json
from eagle2.evaluation.tables import results_json, tables_text
from eagle2.speculative.draft import TreeShape

CALIBRATION = {
    "tree": "4/3/2",
    "trees": 3,
    "steps": {"count": 40, "confidence": 0.5, "acceptance": 0.6, "ece": 0.11},
    "recalibration": {"held_out": {"before": {"ece": 0.12}, "after": {"ece": 0.03}}},
}
IDENTITY = {"target": "t", "limit": 2}


def measured(task: str, method: str, runs: list[int], *, temperature: float = 0.0, length: int = 13) -> Acceptance:
    """One answer of ``length`` tokens, those behind the first in such runs over and over."""
    commits = [1]
    while sum(commits) < length:
        commits += runs
    assert sum(commits) == length
    turn = Turn(f"{task}/1", 1, (1, 2), tuple(range(length)), tuple(commits))
    return Acceptance(Cell(temperature, task, method, "" if method == "plain" else "4/3/2"), (turn,), 2.0)


def recorded(results: Results) -> Results:
    for task in ("qa", "sum"):
        results.add_acceptance(measured(task, "plain", [1]))
    results.add_acceptance(measured("qa", "eagle2", [3]))
    results.add_acceptance(measured("sum", "eagle2", [1, 3]))
    results.add_acceptance(measured("qa", "no_value", [2]))
    return results


def cells(text: str, title: str) -> list[list[str]]:
    lines = text.split(f"### {title}\n\n")[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_tau_stands_by_method_and_task_with_its_mean() -> None:
    values = results_json(recorded(Results(None, IDENTITY)))
    text = tables_text(values)
    head, _, *rows = cells(text, "Tokens per cycle (tau): tree 4/3/2, temperature 0")
    assert head == ["", "sum", "qa", "mean"]  # as tasks are listed
    # A method without all tasks has no mean.
    assert rows == [["EAGLE-2", "2.00", "3.00", "2.50"], ["EAGLE-2, no value", "", "2.00", ""]]
    head, _, *rows = cells(text, "Share of cycles accepted so deep: tree 4/3/2, temperature 0")
    # Four cycles of three tokens, and six of which half are of one and half of three.
    assert rows[0] == ["EAGLE-2", "70.0%", "70.0%", "0.0%"]
    assert text.endswith("All 3 answers that were drafted for have exactly the tokens of plain decoding.")
    assert values["lossless"]
    json.dumps(values)


def test_speed_is_compared_within_rounds_with_plain_decoding() -> None:
    seconds = {("plain", 1): 2.0, ("plain", 2): 4.0, ("eagle2 4/3/2", 1): 1.0, ("eagle2 4/3/2", 2): 1.0}
    runs = [
        Run(number, system, "qa/1", Generation(tuple(range(11)), 0.5, 0.5 + s, cycles=5))
        for (system, number), s in seconds.items()
    ]
    drafting = {"eagle2 4/3/2": ("eagle2", TreeShape(3, 2, 5))}
    raced = race_json(runs, drafting, 0.0, "qa")
    (row,) = raced["rows"]
    assert (row["times_plain"], row["decode_rate"], row["plain_decode_rate"]) == (3.0, 10.0, 3.75)
    assert (row["tau"], row["answers"], raced["lost"]) == (2.0, 2, [])
    results = Results(None, IDENTITY)
    results.add_speed(0.0, "qa", raced)
    text = tables_text(results_json(results))
    assert cells(text, "Times as fast as plain decoding: tree 4/3/2, temperature 0")[2] == ["EAGLE-2", "3.00"]
    assert cells(text, "Tokens per second: tree 4/3/2, temperature 0")[2:] == [["plain", "3.8"], ["EAGLE-2", "10.0"]]

    changed = [*runs[:3], Run(2, "eagle2 4/3/2", "qa/1", Generation((0, 1, 9), 0.5, 1.0, cycles=1))]
    results.add_speed(0.0, "qa", race_json(changed, drafting, 0.0, "qa"))
    values = results_json(results)
    assert not values["lossless"]
    assert "eagle2 with tree 4/3/2 on qa/1 at temperature 0, at position 2" in tables_text(values)


def test_a_token_that_plain_decoding_does_not_have_is_reported() -> None:
    results = recorded(Results(None, IDENTITY))
    results.add_acceptance(measured("sum", "eagle1", [2], length=11))
    values = results_json(results)
    assert not values["lossless"]
    assert {(row["task"], row["method"]) for row in values["tau"] if not row["lossless"]} == {("sum", "eagle1")}
    assert values["lost"] == [
        {"temperature": 0.0, "task": "sum", "method": "eagle1", "tree": "4/3/2", "turn": "sum/1", "position": 11}
    ]
    expected = "NOT LOSSLESS: 1 answers have other tokens than plain decoding; the first is eagle1 with tree 4/3/2"
    assert expected in tables_text(values)


def test_what_a_killed_run_had_is_there_for_the_next(tmp_path: Path) -> None:
    first = recorded(Results(tmp_path, IDENTITY))
    assert list(first.acceptance) != sorted(first.acceptance, key=lambda cell: cell.name)  # as files are read
    first.add_rates(((0.5, 0.25), (0.5, 0.0)), [4, 2])
    first.add_speed(1.0, "qa", {"rows": [], "lost": []})
    first.add_calibration(0.0, CALIBRATION)
    (tmp_path / "parts" / "tau_t0_qa_eagle1_4-3-2.partial").write_text('{"half')  # it was killed here
    second = Results(tmp_path, IDENTITY)
    assert second.acceptance == first.acceptance
    assert (second.rates, second.rate_visits) == (first.rates, [4, 2])
    assert second.speed[1.0, "qa"]["rows"] == []
    assert second.calibration == {"0": CALIBRATION}
    table = cells(
        tables_text(results_json(second)), "Calibration of the draft's confidence (expected calibration error)"
    )
    assert table[2] == ["temperature 0, 4/3/2", "3", "40", "0.500", "0.600", "0.110", "0.120", "0.030"]
    assert results_json(second)["tau"] == results_json(first)["tau"]


def test_results_of_something_else_do_not_mix(tmp_path: Path) -> None:
    recorded(Results(tmp_path, IDENTITY))
    with pytest.raises(ConfigError, match=r"holds results with limit = 2, and this run has 3: name another folder"):
        Results(tmp_path, {**IDENTITY, "limit": 3})
    with pytest.raises(ConfigError, match=r"holds results with dtype = None, and this run has 'float32'"):
        Results(tmp_path, {**IDENTITY, "dtype": "float32"})


@pytest.mark.parametrize("content", ['{"turns"', "[]", '{"task": "qa"}'])
def test_a_broken_result_is_named(content: str, tmp_path: Path) -> None:
    recorded(Results(tmp_path, IDENTITY))
    (tmp_path / "parts" / "tau_x.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tau_x\.json .*; remove it to measure it again"):
        Results(tmp_path, IDENTITY)


def test_methods_are_named() -> None:
    assert parse_methods("all") == DRAFTING
    assert parse_methods("eagle2, plain,eagle1") == ("eagle2", "eagle1")
    with pytest.raises(ConfigError, match="'eagle3' is no method; there are plain, eagle1, eagle2"):
        parse_methods("eagle3")
    with pytest.raises(ConfigError, match="The method eagle1 is named twice"):
        parse_methods("eagle1,eagle1")
