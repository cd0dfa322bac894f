"""What the peers did, as Markdown for people and JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.peers.peers import OFF, TRANSFORMERS
from benchmarks.peers.workers import Worker
from eagle2.evaluation.load.intervals import Ratio, paired_ratio
from eagle2.evaluation.report import markdown_table
from eagle2.evaluation.speed import Run, differences, speed_of

_REFERENCES = (OFF, TRANSFORMERS)


def peers_text(workers: Sequence[Worker], runs: Sequence[Run]) -> str:
    """The table, and the rate of every round."""
    values = peers_json(workers, runs)["systems"]
    names = [worker.name for worker in workers]
    references = [name for name in _REFERENCES if name in names]
    prompts = len({run.prompt for run in runs})
    head = ["", "decode tok/s", "total tok/s", "tok/CPU s", "first token s", "tau"]
    head += [f"x {name}" for name in references]
    if OFF in names:
        head.append(f"answers as {OFF}")
    rows, by_round = [], []
    for name in names:
        own = values[name]
        cells = [f"{median(own['decode_rates']):.1f}", f"{median(own['total_rates']):.1f}", f"{own['cpu_rate']:.1f}"]
        cells += [f"{own['first_token_s']:.2f}", f"{own['tau']:.2f}" if own["tau"] else ""]
        for reference in references:
            cells.append("1.00" if name == reference else str(times(name, reference, runs)))
        if OFF in names:
            cells.append(f"{own['same_answers']} of {prompts}")
        rows.append([name, *cells])
        by_round.append([name, *(f"{rate:.1f}" for rate in own["decode_rates"])])
    rounds = [f"round {number}" for number in sorted({run.round for run in runs})]
    versions = "\n".join(
        f"- {worker.name}: {', '.join(f'{name} {number}' for name, number in worker.about['versions'].items())}"
        for worker in workers
    )
    parts = (markdown_table(head, rows), "Decode tok/s by round:", markdown_table(["", *rounds], by_round), versions)
    return "\n\n".join(parts)


def peers_json(workers: Sequence[Worker], runs: Sequence[Run]) -> dict[str, Any]:
    """Summaries, and every single run. ``cpu_rate``: all tokens by all CPU time of a system's processes."""
    systems: dict[str, Any] = {}
    names = [worker.name for worker in workers]
    for worker in workers:
        own = [run.generation for run in runs if run.system == worker.name]
        systems[worker.name] = {
            **asdict(speed_of(worker.name, runs)),
            # The first answers were the warm-up.
            "cpu_rate": sum(len(g.token_ids) for g in own) / max(sum(worker.cpu_s[-len(own) :]), 1e-9),
            "times": {name: asdict(times(worker.name, name, runs)) for name in _REFERENCES if name in names},
            "same_answers": _same(worker.name, runs),
            **worker.about,
        }
    return {"systems": systems, "runs": [asdict(run) for run in runs]}


def times(system: str, reference: str, runs: Sequence[Run]) -> Ratio:
    """How many times as fast in decoding, answer by answer: those to one prompt in one round are pairs."""
    rates = {(run.system, run.round, run.prompt): run.generation.decode_rate for run in runs}
    answers = [(number, prompt) for name, number, prompt in rates if name == system]
    pairs = [(rates[system, *answer], rates[reference, *answer]) for answer in answers]
    # An answer of one token has no rate.
    both = [pair for pair in pairs if all(pair)]
    return paired_ratio([ours for ours, _ in both], [theirs for _, theirs in both])


def lost(workers: Sequence[Worker], runs: Sequence[Run]) -> int:
    """How many of this engine's runs have other tokens than its plain decoding: there must be none."""
    ours = [worker.name for worker in workers if worker.name.startswith("eagle2")]
    return sum(len(differences(name, OFF, runs)) for name in ours) if OFF in ours else 0


def _same(system: str, runs: Sequence[Run]) -> int | None:
    """Prompts on which all answers are those of this engine's plain decoding; None where it was not measured."""
    if not any(run.system == OFF for run in runs):
        return None
    prompts: Mapping[str, None] = dict.fromkeys(run.prompt for run in runs)
    return len(prompts) - len({difference.prompt for difference in differences(system, OFF, runs)})
