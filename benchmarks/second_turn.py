"""The second turn of a long conversation: what the proposer is sent and how long, with its rows kept and without.

    python benchmarks/second_turn.py [--history 1000] [--answer 32] [--rounds 5] [--threads 1]

The target keeps its prefixes in both cases. The two pairs share one set of the target's weights and take turns; every
round is another tenant, so that its first turn is cold. What is printed is a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from eagle2.config import Settings, load_settings
from eagle2.engine.assemble import build_engine, load_checkpoint, load_target_model
from eagle2.engine.engine import Engine
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.measure import bench_request
from eagle2.evaluation.report import conditions_lines
from eagle2.protocol import Commit
from eagle2.telemetry import metrics
from eagle2.verifier.start import connect_in_process, new_incarnation

_TEXT = "The harbour was quiet in the morning, and the boats lay side by side along the old stone wall. "
_LINE = "And what did the keeper of the harbour say about the weather of that day?"


@dataclass
class _Turns:
    """Second turns, one value each, up to the first tree that was verified: rows, and seconds."""

    sent: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    first_tree_s: list[float] = field(default_factory=list)


def _turn(engine: Engine, prompt: Sequence[int], answer: int, tenant: str, turns: _Turns | None = None) -> list[int]:
    """The tokens of one answer; with ``turns``, what its beginning took is noted there."""
    commits: list[tuple[float, Commit]] = []
    request = bench_request(prompt, answer, speculation=True, name=tenant)
    request = replace(request, tenant=tenant, stop=replace(request.stop, ignore_eos=True))
    counted = (metrics.DRAFT_ROWS_SENT, metrics.DRAFT_ROWS_FOUND, metrics.DRAFT_SECONDS)
    before = [engine.stats.get(metric) for metric in counted]
    trees = engine.stats.get(metrics.NUM_DRAFTS)
    engine.submit(request, lambda commit: commits.append((time.perf_counter(), commit)))
    began = time.perf_counter()
    while engine.stats.get(metrics.NUM_DRAFTS) == trees and engine.step():
        pass
    if turns is not None:
        sent, found, seconds = (engine.stats.get(m) - old for m, old in zip(counted, before, strict=True))
        turns.sent.append(sent)
        turns.found.append(found)
        turns.draft_s.append(seconds)
        turns.first_token_s.append(commits[0][0] - began)
        turns.first_tree_s.append(commits[-1][0] - began)
    while engine.step():
        pass
    return [token for _, commit in commits for token in commit.token_ids]


def _row(name: str, turns: _Turns) -> str:
    rows = f"{np.median(turns.sent):.0f} | {np.median(turns.found):.0f}"
    times = (turns.draft_s, turns.first_token_s, turns.first_tree_s)
    return f"| {name} | {rows} | {' | '.join(f'{1e3 * np.median(values):.0f}' for values in times)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="What a proposer is sent at the second turn of a long conversation.")
    parser.add_argument("--history", type=int, default=1000, help="tokens of the first turn's prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    settings = load_settings(flags={"engine": {"threads": arguments.threads, "max_sequences": 1}})
    checkpoint = load_checkpoint(settings.model)
    model = load_target_model(settings, checkpoint)

    def engine_with(kept: bool) -> Engine:
        drafting: Settings = replace(settings, engine=replace(settings.engine, prefix_cache=kept))
        connect = connect_in_process(drafting, checkpoint)
        engine = build_engine(settings, checkpoint, connect, new_incarnation(), model)
        while not engine.stats.get(metrics.PROPOSER_UP):
            engine.step()
        return engine

    engines = {"kept": engine_with(True), "sent again": engine_with(False)}
    results = {name: _Turns() for name in engines}
    encode = partial(checkpoint.tokenizer.encode, add_special_tokens=False)
    text = encode(_TEXT * (1 + arguments.history // 15))[: arguments.history]
    line = encode(_LINE)
    for number in range(arguments.rounds + 1):
        answers = []
        for name, engine in engines.items():
            tenant = f"round-{number}"
            first = _turn(engine, text, arguments.answer, tenant)
            # The first round is for what is still to be compiled.
            turns = results[name] if number else None
            answers.append(_turn(engine, [*text, *first, *line], arguments.answer, tenant, turns))
        assert answers[0] == answers[1], "what is kept has changed an answer"
    for engine in engines.values():
        engine.stop()
    print("| rows of the first turn | sent | found | drafting, ms | first token, ms | first tree verified, ms |")
    print("| --- | --: | --: | --: | --: | --: |")
    for name, result in results.items():
        print(_row(name, result))
    print(f"\n{conditions_lines(Conditions.now(load), method=f'medians of {arguments.rounds} rounds')}")


if __name__ == "__main__":
    main()
