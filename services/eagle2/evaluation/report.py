"""What was measured, as Markdown for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle2.evaluation.acceptance import Acceptance
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.trees import shape_name


def acceptance_table(results: Sequence[Acceptance]) -> str:
    """One line a tree shape."""
    depth = max(result.shape.depth for result in results)
    head = ["tree", "tau", "cycles", *(f"depth {i}" for i in range(1, depth + 1))]
    rows = []
    for result in results:
        shares = [f"{share:.0%}" for share in result.per_position]
        blanks = [""] * (depth - len(shares))
        rows.append([shape_name(result.shape), f"{result.tau:.2f}", str(result.cycles), *shares, *blanks])
    return markdown_table(head, rows)


def acceptance_json(results: Sequence[Acceptance]) -> list[dict[str, Any]]:
    return [
        {
            "tree": shape_name(result.shape),
            "tau": result.tau,
            "tokens": result.tokens,
            "cycles": result.cycles,
            "accepted_per_position": list(result.per_position),
            "prompts": {
                name: {"tau": generation.tau, "tokens": len(generation.token_ids), "cycles": generation.cycles}
                for name, generation in result.generations.items()
            },
        }
        for result in results
    ]


def conditions_lines(conditions: Conditions, model: Mapping[str, Any]) -> str:
    """The circumstances as a list, so that a number never stands without them."""
    versions = ", ".join(f"{name} {number}" for name, number in conditions.versions.items())
    asked = f"{model['prompts']} prompts of {model['prompt_source']}, {model['max_tokens']} tokens each, greedy"
    return "\n".join(
        (
            f"- Command: `{conditions.command}` at commit {conditions.commit}, {conditions.date}",
            f"- Machine: {conditions.cpu}, {conditions.cores} cores, {conditions.threads} threads, "
            f"load {conditions.load:.1f} at the start",
            f"- Model: {model['target']} in {model['dtype']}, draft head: {model['draft'] or 'none'}; {asked}",
            f"- Versions: {versions}",
        )
    )


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
