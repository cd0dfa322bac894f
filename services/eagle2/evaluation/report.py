"""What was measured, as Markdown for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.speed import Difference, Run, differences, ratio, speed_of


@dataclass(frozen=True, slots=True)
class Comparison:
    """Systems that answered the same prompts. ``plain`` and ``baseline`` name those that others are compared with.

    ``lost`` are the runs in which speculation changed a token: there must be none. ``gaps`` holds, for prompts on which
    the baseline's tokens differ from ``plain``'s, how far apart the baseline's logits of the two tokens lie.
    """

    systems: tuple[str, ...]
    plain: str
    baseline: str | None
    runs: Sequence[Run]
    lost: Sequence[Difference]
    dtype: str
    gaps: Mapping[str, float] = field(default_factory=dict)


def speed_text(comparison: Comparison) -> str:
    """The table, what it says of the tokens, and the rate of every round."""
    runs = comparison.runs
    speeds = {name: speed_of(name, runs) for name in comparison.systems}
    baseline = speeds[comparison.baseline] if comparison.baseline else None
    plain = speeds[comparison.plain]
    head = ["", "decode tok/s", "total tok/s", "first token s", "tau", "x transformers", "x plain"]
    rows, by_round = [], []
    for name, speed in speeds.items():
        cells = [f"{median(speed.decode_rates):.1f}", f"{median(speed.total_rates):.1f}", f"{speed.first_token_s:.2f}"]
        cells.append("" if speed.tau is None else f"{speed.tau:.2f}")
        cells.append(f"{ratio(speed, baseline):.2f}" if baseline else "")
        cells.append(f"{ratio(speed, plain):.2f}")
        rows.append([name, *cells])
        by_round.append([name, *(f"{rate:.1f}" for rate in speed.decode_rates)])
    rounds = [f"round {i}" for i in range(1, len(plain.decode_rates) + 1)]
    parts = (
        markdown_table(head, rows),
        tokens_text(comparison),
        "Decode tok/s by round:",
        markdown_table(["", *rounds], by_round),
    )
    return "\n\n".join(part for part in parts if part)


def tokens_text(comparison: Comparison) -> str:
    """Whether the systems gave the same tokens, in sentences."""
    prompts = len({run.prompt for run in comparison.runs})
    sentences = []
    if comparison.lost:
        first = comparison.lost[0]
        sentences.append(
            f"NOT LOSSLESS: {len(comparison.lost)} runs gave other tokens than plain decoding; the first is "
            f"{first.system} on {first.prompt} in round {first.round}, at position {first.position}."
        )
    elif set(comparison.systems) - {comparison.plain, comparison.baseline}:
        sentences.append(
            f"Token ids with speculation on and off are identical on all {prompts} prompts in every round."
        )
    if comparison.baseline:
        found = differences(comparison.baseline, comparison.plain, comparison.runs)
        positions = {difference.prompt: difference.position for difference in found}
        same = f"`transformers` gives the same token ids on {prompts - len(positions)} of {prompts} prompts"
        if positions:
            # A prompt is named by where it parts: at which token, and how little decided it there.
            parted = [
                f"{position}" + (f" (gap {comparison.gaps[prompt]:.3f})" if prompt in comparison.gaps else "")
                for prompt, position in positions.items()
            ]
            same += f"; on the others the first difference is at position {', '.join(parted)}"
            if comparison.dtype != "float32":
                same += (
                    f": sums in another order, rounded to {comparison.dtype}; a gap is that of the two tokens' logits"
                )
        sentences.append(f"{same}.")
    return " ".join(sentences)


def speed_json(comparison: Comparison) -> dict[str, Any]:
    """Summaries, and every single run, so that other statistics can be made of them."""
    speeds = {name: speed_of(name, comparison.runs) for name in comparison.systems}
    baseline = speeds[comparison.baseline] if comparison.baseline else None
    agreement = differences(comparison.baseline, comparison.plain, comparison.runs) if comparison.baseline else []
    return {
        "systems": {
            name: {
                **asdict(speed),
                "times_transformers": ratio(speed, baseline) if baseline else None,
                "times_plain": ratio(speed, speeds[comparison.plain]),
            }
            for name, speed in speeds.items()
        },
        "lossless": not comparison.lost,
        "lost": [asdict(difference) for difference in comparison.lost],
        "transformers_differs": [
            {**asdict(difference), "gap": comparison.gaps.get(difference.prompt)} for difference in agreement
        ],
        "runs": [asdict(run) for run in comparison.runs],
    }


def conditions_lines(conditions: Conditions, model: Mapping[str, Any] | None = None, *, method: str = "") -> str:
    """The circumstances as a list, so that a number never stands without them. method: how it was measured."""
    versions = ", ".join(f"{name} {number}" for name, number in conditions.versions.items())
    lines = [
        f"- Command: `{conditions.command}` at commit {conditions.commit}, {conditions.date}",
        f"- Machine: {conditions.cpu}, {conditions.cores} cores, {conditions.threads} threads, "
        f"load {conditions.load:.1f} at the start{method and f'; {method}'}",
    ]
    if model is not None:
        draft = f"draft head: {model['draft'] or 'none'}"
        lines.append(f"- Model: {model['target']} in {model['dtype']}, {draft}; {model['asked']}")
    return "\n".join([*lines, f"- Versions: {versions}"])


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns line up as text too; all but the first are right-aligned."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(head))]

    def written(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "| " + " | ".join([first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([written(lines[0]), rule, *(written(line) for line in lines[1:])])


def write_report(folder: Path, name: str, markdown: str, values: Mapping[str, Any]) -> None:
    """``name``.md and ``name``.json in ``folder``, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown + "\n", encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def conditions_json(conditions: Conditions, model: Mapping[str, Any]) -> dict[str, Any]:
    return {**asdict(conditions), "model": dict(model)}
