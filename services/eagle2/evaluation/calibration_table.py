"""The calibration of a head as a table for people, made from the bench's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle2.evaluation.report import markdown_table

_HEAD = ["", "predictions", "mean confidence", "accepted", "ECE", "ECE, equal mass", "Brier score", "log loss"]


def calibration_text(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """A table for each sampling temperature (``reports`` are those of ``calibration_report``), and what was fitted."""
    parts = []
    for temperature, report in reports.items():
        rows = [
            _row("every drafted token, once its parent is accepted", report["steps"]),
            _row("of these, the likeliest of its place", report["first_choices"]),
            _row("whole paths (the value of a node)", report["paths"]),
        ]
        trees = f"{report['trees']} trees; {report['unobserved']} more were the last of an answer and are not seen"
        parts.append(f"### Draft confidence against acceptance: temperature {temperature}")
        recalibration = report["recalibration"]
        if recalibration is None:
            parts += [markdown_table(_HEAD, rows), f"{trees}. Too few answers for a recalibration."]
            continue
        held_out = recalibration["held_out"]
        rows += [
            _row("tokens, held-out half, as they are", held_out["before"]),
            _row("tokens, held-out half, recalibrated", held_out["after"]),
            _row("paths, held-out half, as they are", held_out["paths_before"]),
            _row("paths, held-out half, recalibrated", held_out["paths_after"]),
        ]
        by_depth = ", ".join(f"{value:.2f}" for value in recalibration["by_depth"]) or "too few"
        parts += [
            markdown_table(_HEAD, rows),
            f"{trees}. Temperature on the log-odds: {recalibration['temperature']:.2f} for all depths; by depth: "
            f"{by_depth}. The held-out rows are recalibrated by what the other half of the answers says.",
        ]
    return "\n\n".join(parts)


def _row(name: str, measured: Mapping[str, Any]) -> list[str]:
    values = (measured[key] for key in ("confidence", "acceptance", "ece", "ece_equal_mass", "brier", "log_loss"))
    return [name, f"{measured['count']}", *(f"{value:.4f}" for value in values)]
