"""The tables of a bench, methods by tasks, made from its JSON: an old report can be written again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from eagle2.evaluation.acceptance import Acceptance, Cell, Lost, lost_in
from eagle2.evaluation.methods import DRAFTING, PLAIN
from eagle2.evaluation.questions import TASKS
from eagle2.evaluation.report import markdown_table
from eagle2.evaluation.results import Results

Row = Mapping[str, Any]

_KEYS = ("temperature", "task", "method", "tree")
_TITLES = {
    "plain": "plain",
    "eagle1": "EAGLE-1, static tree",
    "eagle2": "EAGLE-2",
    "no_value": "EAGLE-2, no value",
    "no_rerank": "EAGLE-2, no rerank",
    "neither": "EAGLE-2, neither",
}


def results_json(results: Results) -> dict[str, Any]:
    """Everything that was measured, for programs and plots.

    ``tau``: a row for each temperature, task, method and tree. ``speed``: the same with ``times_plain`` (median over
    the rounds of the ratio within a round). ``static``: the rates that EAGLE-1's trees are placed by, by depth and
    rank. ``calibration``: reports by temperature. ``lost``: answers that are not those of plain decoding.
    """
    measured = results.acceptance
    plain = {cell: measured.get(Cell(cell.temperature, cell.task, PLAIN)) for cell in measured}
    compared = [(found, base) for cell, found in measured.items() if (base := plain[cell]) is not None]
    compared.sort(key=lambda pair: _place(pair[0].cell))
    lost = [difference for found, base in compared for difference in lost_in(found, base)]
    raced = [row for values in results.speed.values() for row in values["rows"]]
    return {
        "tau": [_tau_row(found, base) for found, base in compared],
        "speed": sorted(raced, key=lambda row: _place(Cell(*(row[key] for key in _KEYS)))),
        "static": {"rates": results.rates, "visits": results.rate_visits},
        "calibration": results.calibration,
        "lossless": not lost and all(not values["lost"] for values in results.speed.values()),
        "lost": [
            *(_lost_row(difference) for difference in lost),
            *({**row, "temperature": t} for (t, _), values in results.speed.items() for row in values["lost"]),
        ],
    }


def tables_text(values: Mapping[str, Any]) -> str:
    """All tables of ``results_json``, and whether the tokens are the same."""
    parts = []
    for temperature in dict.fromkeys(row["temperature"] for row in [*values["tau"], *values["speed"]]):
        tau = [row for row in values["tau"] if row["temperature"] == temperature]
        speed = [row for row in values["speed"] if row["temperature"] == temperature]
        for tree in dict.fromkeys(row["tree"] for row in [*tau, *speed] if row["tree"]):
            here = f"tree {tree}, temperature {temperature:g}"
            own = [row for row in tau if row["tree"] == tree]
            fast = [row for row in speed if row["tree"] == tree]
            if own:
                parts += [f"### Tokens per cycle (tau): {here}", _by_task(own, "tau")]
            if fast:
                parts += [f"### Times as fast as plain decoding: {here}", _by_task(fast, "times_plain")]
                parts += [f"### Tokens per second: {here}", _rates_table(fast)]
            if own:
                parts += [f"### Share of cycles accepted so deep: {here}", _positions(own)]
    if values["calibration"]:
        parts += ["### Calibration of the draft's confidence (expected calibration error)", _calibration(values)]
    parts.append(tokens_text(values))
    return "\n\n".join(parts)


def tokens_text(values: Mapping[str, Any]) -> str:
    """Whether all methods gave the tokens of plain decoding, in a sentence."""
    if values["lost"]:
        first = values["lost"][0]
        return (
            f"NOT LOSSLESS: {len(values['lost'])} answers have other tokens than plain decoding; the first is "
            f"{first['method']} with tree {first['tree']} on {first['turn']} at temperature "
            f"{first['temperature']:g}, at position {first['position']}."
        )
    drafted = [row for row in values["tau"] if row["method"] != PLAIN]
    answers = sum(row["answers"] for row in drafted) + sum(row["answers"] for row in values["speed"])
    if not answers:
        return "Nothing was drafted."
    return f"All {answers} answers that were drafted for have exactly the tokens of plain decoding."


def _by_task(rows: Sequence[Row], key: str) -> str:
    """Methods by tasks, and the mean over the tasks where all of them are there."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    head = ["", *tasks, *(["mean"] if len(tasks) > 1 else [])]
    lines = []
    for method in _methods(rows):
        of_task = {row["task"]: row[key] for row in rows if row["method"] == method}
        cells = [f"{of_task[task]:.2f}" if task in of_task else "" for task in tasks]
        if len(tasks) > 1:
            cells.append(f"{fmean(of_task.values()):.2f}" if len(of_task) == len(tasks) else "")
        lines.append([_TITLES[method], *cells])
    return markdown_table(head, lines)


def _rates_table(rows: Sequence[Row]) -> str:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    plain = {row["task"]: row["plain_decode_rate"] for row in rows}
    lines = [[_TITLES[PLAIN], *(f"{plain[task]:.1f}" for task in tasks)]]
    for method in _methods(rows):
        of_task = {row["task"]: row["decode_rate"] for row in rows if row["method"] == method}
        lines.append([_TITLES[method], *(f"{of_task[task]:.1f}" if task in of_task else "" for task in tasks)])
    return markdown_table(["", *tasks], lines)


def _positions(rows: Sequence[Row]) -> str:
    """All tasks together, weighted by their cycles."""
    depth = max(len(row["accepted_per_position"]) for row in rows)
    lines = []
    for method in _methods(rows):
        shares = shares_by_depth([row for row in rows if row["method"] == method])
        lines.append([_TITLES[method], *(f"{share:.1%}" for share in shares)])
    return markdown_table(["", *(f"depth {d}" for d in range(1, depth + 1))], lines)


def shares_by_depth(rows: Sequence[Row]) -> list[float]:
    """Of the cycles of all rows together, the share that was accepted so deep; a row without a depth has none there."""
    depth = max(len(row["accepted_per_position"]) for row in rows)
    cycles = sum(row.get("cycles", 1) for row in rows) or 1
    padded = [(row.get("cycles", 1), [*row["accepted_per_position"], *([0.0] * depth)]) for row in rows]
    return [sum(count * shares[d] for count, shares in padded) / cycles for d in range(depth)]


def _calibration(values: Mapping[str, Any]) -> str:
    """Before and after recalibration both on texts that it was not fitted on, where there were enough."""
    head = ["", "trees", "tokens", "confidence", "accepted", "error", "held out", "recalibrated"]
    lines = []
    for temperature, report in values["calibration"].items():
        steps, found = report["steps"], report["recalibration"]
        held_out = [f"{found['held_out'][key]['ece']:.3f}" for key in ("before", "after")] if found else ["", ""]
        means = [f"{steps[key]:.3f}" for key in ("confidence", "acceptance", "ece")]
        counts = [str(report["trees"]), str(steps["count"])]
        lines.append([f"temperature {temperature}, {report['tree']}", *counts, *means, *held_out])
    return markdown_table(head, lines)


def _methods(rows: Sequence[Row]) -> list[str]:
    found = {row["method"] for row in rows}
    return [method for method in (PLAIN, *DRAFTING) if method in found]


def _tau_row(measured: Acceptance, plain: Acceptance) -> dict[str, Any]:
    cell = measured.cell
    depth = int(cell.tree.split("/")[1]) if cell.tree else 0
    return {
        **{key: getattr(cell, key) for key in _KEYS},
        "tau": measured.tau,
        "tokens": measured.tokens,
        "cycles": measured.cycles,
        "answers": len(measured.turns),
        "accepted_per_position": list(measured.per_position(depth)),
        "lossless": not lost_in(measured, plain),
    }


def _place(cell: Cell) -> tuple[float, int, int, str, int]:
    """The order of rows: the largest tree first, tasks and methods as they are listed."""
    nodes = -int(cell.tree.split("/")[0]) if cell.tree else 0
    task = TASKS.index(cell.task) if cell.task in TASKS else len(TASKS)
    return cell.temperature, nodes, task, cell.task, (PLAIN, *DRAFTING).index(cell.method)


def _lost_row(lost: Lost) -> dict[str, Any]:
    return {**{key: getattr(lost.cell, key) for key in _KEYS}, "turn": lost.turn, "position": lost.position}
