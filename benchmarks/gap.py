"""The gap between tokens while a long prompt is read beside sequences that decode, with the bound and without.

    python benchmarks/gap.py [--bounds 0.2,none] [--prompt 2000] [--decoding 4] [--rounds 3] [--draft none] [--cpu-time]

All engines share one set of weights and take turns; drafting is done in the same thread. Gaps are between commits of
one sequence, from the moment that the prompt arrives to its first token; what is printed is a table in Markdown.
``--cpu-time`` measures, and paces, by processor time: with one thread, what a wall clock shows on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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

_WARM_COMMITS = 8  # of every sequence that decodes, before the prompt arrives
_TEXT = "The harbour was quiet in the morning, and the boats lay side by side along the old stone wall. "


@dataclass
class _Stream:
    """When a sequence's commits came."""

    clock: Callable[[], float]
    times: list[float] = field(default_factory=list)

    def take(self, commit: Commit) -> None:
        if commit.error is not None:
            raise RuntimeError(commit.error)
        self.times.append(self.clock())

    def gaps(self, begin: float, end: float) -> list[float]:
        """Between commits, those that lie across ``begin`` or ``end`` included."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [after - before for before, after in pairs if after > begin and before < end]


@dataclass
class _Result:
    """Over all rounds: gaps before the prompt came and while it was read, and what its first token took, in seconds."""

    calm: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)


def _run(
    engine: Engine,
    clock: Callable[[], float],
    prompts: Sequence[Sequence[int]],
    long: Sequence[int],
    result: _Result,
) -> None:
    streams, sequences = [], []
    for number, prompt in enumerate(prompts):
        stream = _Stream(clock)
        request = bench_request(prompt, 1500, speculation=True, name=f"decoding-{number}")
        request = replace(request, stop=replace(request.stop, ignore_eos=True))
        sequences.append(engine.submit(request, stream.take))
        streams.append(stream)
    _step_until(engine, streams, _WARM_COMMITS)
    warm = clock()
    _step_until(engine, streams, 2 * _WARM_COMMITS)
    reader = _Stream(clock)
    begin = clock()
    engine.submit(bench_request(long, 1, speculation=True, name="long"), reader.take)
    _step_until(engine, [reader], 1)
    end = reader.times[0]
    _step_until(engine, streams, 1 + max(len(stream.times) for stream in streams))
    for sequence in sequences:
        engine.cancel(sequence)
    for stream in streams:
        result.calm.extend(stream.gaps(warm, begin))
        result.reading.extend(stream.gaps(begin, end))
    result.first_token.append(end - begin)
    while engine.step():
        pass


def _step_until(engine: Engine, streams: Sequence[_Stream], commits: int) -> None:
    """Step until each of ``streams`` has so many commits."""
    while min(len(stream.times) for stream in streams) < commits:
        engine.step()


def _settings(arguments: argparse.Namespace, bound: float | None) -> Settings:
    engine = {"max_token_gap_s": bound, "max_sequences": arguments.decoding + 1, "prefix_cache": False}
    model = {"draft": None} if arguments.draft == "none" else {}
    return load_settings(flags={"engine": {**engine, "threads": arguments.threads}, "model": model})


def _row(name: str, result: _Result) -> str:
    def ms(values: list[float]) -> str:
        p50, p99 = np.percentile(values, [50, 99])
        return f"{1e3 * p50:.0f} | {1e3 * p99:.0f} | {1e3 * max(values):.0f}"

    return f"| {name} | {ms(result.calm)} | {ms(result.reading)} | {np.median(result.first_token):.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="The gap between tokens while a long prompt is read.")
    parser.add_argument("--bounds", default="0.2,none", help="values of engine.max_token_gap_s, 'none' for no bound")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the long prompt")
    parser.add_argument("--decoding", type=int, default=4, help="sequences that decode meanwhile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of a wall clock")
    parser.add_argument("--draft", choices=("embedded", "none"), default="embedded")
    arguments = parser.parse_args()
    load, clock = os.getloadavg()[0], time.process_time if arguments.cpu_time else time.perf_counter
    bounds = [None if text == "none" else float(text) for text in arguments.bounds.split(",")]
    common = _settings(arguments, None)
    checkpoint = load_checkpoint(common.model)
    model = load_target_model(common, checkpoint)

    def engine_with(bound: float | None) -> Engine:
        settings = _settings(arguments, bound)
        connect = connect_in_process(settings, checkpoint)
        return build_engine(settings, checkpoint, connect, new_incarnation(), model, clock=clock)

    engines = {str(bound): engine_with(bound) for bound in bounds}
    connected = common.model.draft is not None
    results = {name: _Result() for name in engines}
    text = checkpoint.tokenizer.encode(_TEXT * (1 + arguments.prompt // 15), add_special_tokens=False)
    for engine in engines.values():
        while connected and not engine.stats.get(metrics.PROPOSER_UP):
            engine.step()
    for number in range(arguments.rounds + 1):
        for name, engine in engines.items():
            prompts = [text[i : i + 40] for i in range(arguments.decoding)]
            # The first round is for what is still to be compiled and learnt.
            result = results[name] if number else _Result()
            _run(engine, clock, prompts, text[number : number + arguments.prompt], result)
    for engine in engines.values():
        engine.stop()
    print("| bound, s | before: p50 | p99 | most | while reading: p50 | p99 | most | first token |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    for name, result in results.items():
        print(_row(name, result))
    seconds = "processor time" if arguments.cpu_time else "wall clock"
    print(f"\nGaps in ms, first token in s, {seconds}.")
    print(f"\n{conditions_lines(Conditions.now(load))}")


if __name__ == "__main__":
    main()
