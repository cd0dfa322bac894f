"""What was measured under load, as Markdown for people and JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from eagle2.evaluation.load.cells import Cell, Load
from eagle2.evaluation.load.contenders import ADAPTIVE, OFF
from eagle2.evaluation.load.intervals import Ratio, paired_ratio, percentile
from eagle2.evaluation.load.texts import Texts
from eagle2.evaluation.report import markdown_table


def load_text(cells: Sequence[Cell], texts: Texts) -> str:
    """Paired ratios by load, what every contender did under each load, and what the tokens say."""
    contenders = list(dict.fromkeys(cell.contender for cell in sorted(cells, key=_as_listed)))
    loads = list(dict.fromkeys(cell.load for cell in cells))
    parts = []
    pairs = compared(contenders)
    if pairs:
        head = ["tok/s, paired by round", *(load.name for load in loads)]
        for title, rate in (("", _rate), (" (CPU time)", _cpu_rate)):
            rows = [
                [f"{ours} / {theirs}{title}", *(str(ratio_of(cells, load, ours, theirs, rate)) for load in loads)]
                for ours, theirs in pairs
            ]
            best = [best_fixed(cells, load, rate) for load in loads]
            if ADAPTIVE in contenders and len({name for name in best if name}) > 1:
                rows.append(
                    [
                        f"{ADAPTIVE} / best fixed{title}",
                        *(
                            f"{ratio_of(cells, load, ADAPTIVE, name, rate)} ({name.removeprefix('fixed ')})"
                            for load, name in zip(loads, best, strict=True)
                            if name is not None
                        ),
                    ]
                )
            parts.append(markdown_table(head, rows))
    parts.append(markdown_table(_HEAD, _rows(cells, contenders, loads)))
    if any(load.rate is not None for load in loads):
        late = [s for cell in cells for s in cell.late_s if cell.load.rate is not None]
        parts.append(
            f"Requests of the open loop were sent {1000 * median(late):.1f} ms late at the median and "
            f"{1000 * max(late):.1f} ms at most; times to the first token count from when they were due."
        )
    parts.append(texts_text(texts))
    return "\n\n".join(parts)


_HEAD = (
    *("load", "", "tok/s", "tok/CPU s", "first token s p50", "p95", "ms/token p50", "p95", "gap ms p99"),
    *("tau", "nodes a step", "plain steps", "steps"),
)


def _rows(cells: Sequence[Cell], contenders: Sequence[str], loads: Sequence[Load]) -> Iterable[list[str]]:
    for load in loads:
        for contender in contenders:
            own = [cell for cell in cells if cell.load == load and cell.contender == contender]
            summary = summary_of(own)
            yield [
                load.name,
                contender,
                f"{summary['rate']:.1f}",
                f"{summary['cpu_rate']:.1f}",
                *(_number(summary[key], "{:.2f}") for key in ("first_token_s_p50", "first_token_s_p95")),
                *(_number(_ms(summary[key]), "{:.1f}") for key in ("token_s_p50", "token_s_p95")),
                _number(_ms(summary["gap_s_p99"]), "{:.0f}"),
                f"{summary['tau']:.2f}",
                f"{summary['nodes_a_step']:.1f}",
                f"{summary['plain_share']:.0%}" if contender == ADAPTIVE else "",
                f"{summary['cycles']}",
            ]


def summary_of(cells: Sequence[Cell]) -> dict[str, Any]:
    """One contender under one load over all rounds: rates are medians of the rounds', times are of all requests."""
    cycles = sum(cell.cycles for cell in cells)
    times = {key: [s for cell in cells for s in getattr(cell, key)] for key in ("first_token_s", "token_s", "gap_s")}
    return {
        "rate": median(cell.rate for cell in cells),
        "cpu_rate": median(cell.cpu_rate for cell in cells),
        **{f"{key}_p{p}": percentile(times[key], p / 100) for key in times for p in (50, 95, 99)},
        "tau": fmean(cell.tau for cell in cells),
        "cycles": cycles,
        "nodes_a_step": sum(cell.drafted for cell in cells) / cycles if cycles else 0.0,
        "plain_share": sum(cell.plain_cycles for cell in cells) / cycles if cycles else 0.0,
        "draft_share": sum(cell.draft_s for cell in cells) / sum(cell.wall_s for cell in cells),
        "verify_share": sum(cell.verify_s for cell in cells) / sum(cell.wall_s for cell in cells),
    }


def compared(contenders: Sequence[str]) -> list[tuple[str, str]]:
    """Who is set against whom: adaptive against all others, without it every tree against plain decoding."""
    if ADAPTIVE in contenders:
        return [(ADAPTIVE, other) for other in contenders if other != ADAPTIVE]
    return [(other, OFF) for other in contenders if other != OFF] if OFF in contenders else []


def ratio_of(cells: Sequence[Cell], load: Load, ours: str, theirs: str, rate: Callable[[Cell], float]) -> Ratio:
    """Two contenders under one load, paired by round."""
    return paired_ratio(*(_rates(cells, load, name, rate) for name in (ours, theirs)))


def best_fixed(cells: Sequence[Cell], load: Load, rate: Callable[[Cell], float]) -> str | None:
    """The fixed tree that was fastest under a load: it is chosen afterwards, which flatters it a little."""
    fixed = {cell.contender for cell in cells if cell.contender not in (OFF, ADAPTIVE)}
    return max(sorted(fixed), key=lambda name: fmean(map(math.log, _rates(cells, load, name, rate))), default=None)


def texts_text(texts: Texts) -> str:
    if texts.lost:
        first = texts.lost[0]
        return (
            f"NOT LOSSLESS: {len(texts.lost)} answers had other tokens than another one to the same prompt; the first "
            f"is {first.contender} on {first.prompt} with {first.load} in round {first.round}, at position "
            f"{first.position}."
        )
    return f"All {texts.compared} answers that could be compared have the same tokens, whatever the contender and load."


def load_json(cells: Sequence[Cell], texts: Texts) -> dict[str, Any]:
    """Summaries, ratios, and every single cell, so that other statistics can be made of them."""
    contenders = list(dict.fromkeys(cell.contender for cell in sorted(cells, key=_as_listed)))
    loads = list(dict.fromkeys(cell.load for cell in cells))
    return {
        "summaries": [
            {
                "load": asdict(load),
                "contender": name,
                **summary_of([cell for cell in cells if cell.load == load and cell.contender == name]),
            }
            for load in loads
            for name in contenders
        ],
        "ratios": [
            {
                "load": asdict(load),
                "ours": ours,
                "theirs": theirs,
                "clock": asdict(ratio_of(cells, load, ours, theirs, _rate)),
                "cpu": asdict(ratio_of(cells, load, ours, theirs, _cpu_rate)),
                "best_fixed": best_fixed(cells, load, _rate),
            }
            for load in loads
            for ours, theirs in compared(contenders)
        ],
        "lossless": not texts.lost,
        "lost": [asdict(lost) for lost in texts.lost],
        "answers_compared": texts.compared,
        "cells": [asdict(cell) for cell in cells],
    }


def _rate(cell: Cell) -> float:
    return cell.rate


def _cpu_rate(cell: Cell) -> float:
    return cell.cpu_rate


def _rates(cells: Sequence[Cell], load: Load, contender: str, rate: Callable[[Cell], float]) -> list[float]:
    own = [cell for cell in cells if cell.load == load and cell.contender == contender]
    return [rate(cell) for cell in sorted(own, key=lambda cell: cell.round)]


def _as_listed(cell: Cell) -> tuple[int, str]:
    """Plain decoding first, then fixed trees, then adaptive ones."""
    return (0 if cell.contender == OFF else 2 if cell.contender == ADAPTIVE else 1), cell.contender


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
