"""Plots of a bench: drawn from whatever a report has, the same figures giving the same file."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import rcParams

from eagle2.evaluation.observations import Observations
from eagle2.evaluation.plots import write_plots
from eagle2.evaluation.recalibration import calibration_report

PNG = b"\x89PNG\r\n\x1a\n"


def calibration(sequences: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    confidence = random.uniform(size=400)
    index = np.arange(400)
    accepted = random.uniform(size=400) < confidence
    depth, yes = np.ones(400, dtype=np.int64), np.ones(400, dtype=np.bool_)
    seen = Observations(
        index % sequences, depth, confidence[:, None], yes, accepted, yes, trees=40, unobserved=sequences
    )
    return calibration_report(seen)


@pytest.fixture
def results() -> dict[str, Any]:
    cells = [
        {"task": task, "method": method, "tree": tree, "temperature": temperature}
        for temperature in (0.0, 1.0)
        for task in ("mt_bench", "gsm8k", "their_own")
        for method, tree in (("eagle2", "59/6/10"), ("eagle2", "10/2/8"), ("eagle1", "59/6/10"))
    ]
    shares = [0.7, 0.4, 0.2]
    return {
        "tau": [{**cell, "tau": 2.3, "cycles": 50, "accepted_per_position": shares} for cell in cells],
        "speed": [{**cell, "times_plain": 1.2} for cell in cells],
        "calibration": {"0": calibration(8), "1": calibration(8)},
        "history": [{"step": s, "regression": 1 / (s + 1), "chain_tau": 2.0, "top1": [0.5]} for s in range(0, 90, 10)],
        "commit": "unknown to plots",
    }


ALL = ["speed.png", "tau.png", "positions.png", "training.png", "calibration_t0.png", "calibration_t1.png"]


def test_a_full_report_gives_all_pictures(results: dict[str, Any], tmp_path: Path) -> None:
    before = dict(rcParams)
    paths = write_plots(results, tmp_path / "plots")
    assert [path.name for path in paths] == ALL
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 10_000
        assert b"matplotlib" not in content.lower()
    assert dict(rcParams) == before


def test_the_same_report_gives_the_same_files(results: dict[str, Any], tmp_path: Path) -> None:
    results = {key: results[key] for key in ("tau", "calibration")}
    first, second = (write_plots(results, tmp_path / name) for name in ("first", "second"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    results["tau"][0]["tau"] = 3.3
    changed = write_plots(results, tmp_path / "third")
    assert changed[0].read_bytes() != first[0].read_bytes()


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ({}, []),
        ({"tau": [], "speed": None, "calibration": {}, "history": [{"step": 1}]}, []),
        ({"tau": [{"task": "gsm8k", "method": "eagle2", "tau": 2.0}]}, ["tau.png"]),
        (
            {"tau": [{"task": "gsm8k", "method": "eagle2", "tau": None, "accepted_per_position": [0.5]}]},
            ["positions.png"],
        ),
        (
            {
                "speed": [
                    {"task": "gsm8k", "method": "eagle2", "temperature": 0.0, "times_plain": 1.4},
                    {"task": "qa", "method": "eagle1", "temperature": 1.0, "times_plain": 0.9},
                    {"task": "qa", "method": "plain", "temperature": 1.0},
                ]
            },
            ["speed.png"],
        ),
        ({"history": [{"step": 1, "tau": 1.5}, {"step": 2}]}, ["training.png"]),
    ],
)
def test_what_a_report_lacks_is_left_out(part: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    paths = write_plots(part, tmp_path)
    assert [path.name for path in paths] == names
    assert all(path.stat().st_size > 5_000 for path in paths)


def test_calibration_without_recalibration_is_drawn_alone(tmp_path: Path) -> None:
    report = calibration(sequences=1)
    assert report["recalibration"] is None
    (path,) = write_plots({"calibration": {"0": report}}, tmp_path)
    assert path.name == "calibration_t0.png"
    assert path.stat().st_size > 10_000


def test_without_matplotlib_there_are_no_plots_and_a_sentence(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with caplog.at_level(logging.WARNING):
        assert write_plots(results, tmp_path / "plots") == []
    assert "need the package matplotlib" in caplog.text
    assert not (tmp_path / "plots").exists()
