"""The pictures of a bench: speed, acceptance, calibration and training, as PNG files.

They are drawn from the JSON report, so an old report can be drawn again. What a report lacks is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle2.evaluation.tables import shares_by_depth

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
Draw = Callable[["Figure"], None]

# Okabe and Ito's palette, which colour-blind readers can tell apart; the lines differ in their marks too.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DPI = 150
_TASKS = {
    "mt_bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "alpaca": "Alpaca",
    "sum": "CNN/DM",
    "qa": "Natural Questions",
}


def write_plots(results: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw what ``results`` has into the folder ``out``; returns the files, none where matplotlib is not installed.

    ``tau``: rows of ``task``, ``method``, ``tree``, ``temperature``, ``tau``, ``cycles``, ``accepted_per_position`` (by
    depth, the share of trees accepted at least so deep).
    ``speed``: rows of ``task``, ``method``, ``tree``, ``temperature``, ``times_plain``.
    ``calibration``: reports of ``calibration_report`` by sampling temperature.
    ``history``: rows of ``step`` and measures, as training writes them.

    A row may lack its tree and its temperature; a row without the value that is drawn is passed over.
    """
    try:
        import matplotlib
    except ImportError:
        logger.warning("No plots: they need the package matplotlib (install eagle2[bench]).")
        return []
    tau, speed = results.get("tau") or (), results.get("speed") or ()
    # The same method has the same colour in every picture.
    series = _distinct([*tau, *speed], _series)
    plots: list[tuple[str, Draw | None]] = [
        ("speed", _bars(speed, series, "times_plain", "times as fast as plain decoding", "Speed-up in decoding")),
        ("tau", _bars(tau, series, "tau", "tokens per cycle", "Mean acceptance length (tau)")),
        ("positions", _positions(tau, series)),
        ("training", _training(results.get("history") or ())),
    ]
    for temperature, report in (results.get("calibration") or {}).items():
        plots.append((f"calibration_t{temperature}", _calibration(report, str(temperature))))
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a reader's own settings would change the picture
        matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
        for name, draw in plots:
            if draw is not None:
                written.append(_save(draw, out / f"{name}.png"))
    return written


def _save(draw: Draw, path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    draw(figure)
    # Without the name and version of the program the same figures give the same file.
    figure.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})
    return path


def _bars(rows: Sequence[Row], series: Sequence[str], key: str, label: str, title: str) -> Draw | None:
    """A panel for each sampling temperature, a group of bars for each task, a bar for each method and tree."""
    rows = [row for row in rows if row.get(key) is not None]
    if not rows:
        return None

    def draw(figure: Figure) -> None:
        temperatures, tasks = _distinct(rows, _temperature), _distinct(rows, _task)
        shown = [name for name in series if name in _distinct(rows, _series)]
        groups = [*tasks, "mean"] if len(tasks) > 1 else tasks
        figure.set_size_inches(max(6.4, 1.2 + 0.27 * len(groups) * (len(shown) + 1)), 0.8 + 2.8 * len(temperatures))
        panels = figure.subplots(len(temperatures), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        width = min(0.84 / len(shown), 0.25)
        for axes, temperature in zip(panels, temperatures, strict=True):
            for place, name in enumerate(shown):
                own = [row for row in rows if _series(row) == name and _temperature(row) == temperature]
                values = {_task(row): float(row[key]) for row in own}
                if len(tasks) > 1 and len(values) == len(tasks):
                    values["mean"] = sum(values.values()) / len(values)
                at = [groups.index(task) + (place + 0.5 - len(shown) / 2) * width for task in values]
                bars = axes.bar(at, [*values.values()], width * 0.92, color=_colour(series, name), label=name)
                axes.bar_label(bars, fmt="%.2f", fontsize=6, rotation=90, padding=2)
            axes.axhline(1.0, color="0.3", linewidth=0.8, linestyle="--")  # plain decoding, in both measures
            axes.set_ylabel(label)
            axes.set_title(title + temperature, fontsize=10, loc="left")
            axes.margins(y=0.15)
            axes.set_xlim(-0.55, len(groups) - 0.45)
            axes.yaxis.grid(True, color="0.9")
        panels[-1].set_xticks(range(len(groups)), groups)
        _legend(figure, panels)

    return draw


def _positions(rows: Sequence[Row], series: Sequence[str]) -> Draw | None:
    """How deep trees are accepted, one line for each method and tree, all tasks together."""
    rows = [row for row in rows if row.get("accepted_per_position")]
    if not rows:
        return None

    def draw(figure: Figure) -> None:
        temperatures = _distinct(rows, _temperature)
        figure.set_size_inches(max(6.4, 0.8 + 4.2 * len(temperatures)), 4.2)
        panels = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)[0]
        for axes, temperature in zip(panels, temperatures, strict=True):
            for name in series:
                own = [row for row in rows if _series(row) == name and _temperature(row) == temperature]
                if own:
                    shares = shares_by_depth(own)
                    mark = _MARKS[series.index(name) % len(_MARKS)]
                    axes.plot(range(1, len(shares) + 1), shares, color=_colour(series, name), marker=mark, label=name)
            axes.set_xlabel("depth in the tree")
            axes.set_ylim(0, 1)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_title(f"Accepted at least so deep{temperature}", fontsize=10, loc="left")
            axes.grid(True, color="0.9")
        panels[0].set_ylabel("share of trees")
        _legend(figure, panels)

    return draw


def _calibration(report: Mapping[str, Any], temperature: str) -> Draw:
    """Reliability of the draft's confidences, with how many there are; recalibrated ones beside it."""

    def draw(figure: Figure) -> None:
        held_out = (report.get("recalibration") or {}).get("held_out")
        shown = [("As the head gives it", report["steps"])]
        if held_out:
            shown = [
                ("Before, held-out texts", held_out["before"]),
                ("Recalibrated, held-out texts", held_out["after"]),
            ]
        figure.set_size_inches(0.6 + 4.4 * len(shown), 5.4)
        panels = figure.subplots(2, len(shown), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 1))
        for column, (name, measured) in enumerate(shown):
            _reliability(panels[0][column], panels[1][column], measured["bins"])
            errors = f"ECE {measured['ece']:.3f} (equal mass {measured['ece_equal_mass']:.3f})"
            title = f"{name}\n{errors}, Brier score {measured['brier']:.3f}"
            panels[0][column].set_title(title, fontsize=9, loc="left")
        panels[0][0].set_ylabel("accepted by the target (share)")
        panels[1][0].set_ylabel("tokens")
        _legend(figure, panels[0])
        title = f"Draft confidence against acceptance, temperature {temperature}, {report['trees']} trees"
        figure.suptitle(title, fontsize=10)

    return draw


def _reliability(axes: Axes, below: Axes, bins: Sequence[Row]) -> None:
    axes.plot([0, 1], [0, 1], color="0.3", linewidth=0.8, linestyle="--", label="perfect calibration")
    left = [row["low"] for row in bins]
    widths = [row["high"] - row["low"] for row in bins]
    accepted = [row["acceptance"] for row in bins]
    axes.bar(left, accepted, widths, align="edge", color=_COLOURS[5], edgecolor="white", label="acceptance in the bin")
    # The standard error of a share: few tokens in a bin say little.
    errors = [(row["acceptance"] * (1 - row["acceptance"]) / row["count"]) ** 0.5 for row in bins]
    axes.errorbar(
        [row["confidence"] for row in bins],
        accepted,
        yerr=errors,
        color=_COLOURS[0],
        marker="o",
        markersize=4,
        linewidth=1,
        capsize=2,
        label="at the bin's mean confidence, \u00b1 standard error",
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.04)  # room for a mark at 1
    below.bar(left, [row["count"] for row in bins], widths, align="edge", color="0.6", edgecolor="white")
    below.set_yscale("log")
    below.set_xlabel("draft confidence")


def _training(history: Sequence[Row]) -> Draw | None:
    """Losses on the left, what is gained on the right, by step; whatever of them was written."""
    panels = [
        ("loss", [key for key in ("loss", "regression", "cross_entropy") if _has(history, key)]),
        ("tokens per cycle", [key for key in ("tau", "chain_tau") if _has(history, key)]),
    ]
    panels = [(label, keys) for label, keys in panels if keys]
    if not panels:
        return None

    def draw(figure: Figure) -> None:
        figure.set_size_inches(0.8 + 4.4 * len(panels), 3.8)
        for axes, (label, keys) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for k, key in enumerate(keys):
                points = [(row["step"], row[key]) for row in history if isinstance(row.get(key), int | float)]
                steps, values = zip(*points, strict=True)
                marks = _MARKS[k] if len(points) < 60 else ""
                axes.plot(steps, values, color=_COLOURS[k], marker=marks, markersize=4, label=key.replace("_", " "))
            axes.set_xlabel("step")
            axes.set_ylabel(label)
            axes.grid(True, color="0.9")
            axes.legend(fontsize=8, frameon=False)
        figure.suptitle("Training: loss of the steps, acceptance on held-out text", fontsize=10)

    return draw


def _has(history: Sequence[Row], key: str) -> bool:
    return any("step" in row and isinstance(row.get(key), int | float) for row in history)


def _distinct(rows: Iterable[Row], name: Callable[[Row], str]) -> list[str]:
    """In order of appearance."""
    return list(dict.fromkeys(name(row) for row in rows))


def _series(row: Row) -> str:
    return " ".join(str(row[key]).replace("_", " ") for key in ("method", "tree") if row.get(key))


def _task(row: Row) -> str:
    return _TASKS.get(row["task"], str(row["task"]))


def _temperature(row: Row) -> str:
    """As the end of a title."""
    return f", temperature {row['temperature']:g}" if row.get("temperature") is not None else ""


def _colour(series: Sequence[str], name: str) -> str:
    return _COLOURS[series.index(name) % len(_COLOURS)]


def _legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Below the panels, where it covers nothing."""
    found: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    columns = min(len(found), 4)
    figure.legend([*found.values()], [*found], loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
