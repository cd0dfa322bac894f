"""A batch as a whole and in two halves, between a proposer and a target that do nothing but take time.

    python benchmarks/overlap.py [--sequences 8] [--draft-ms 3] [--verify-ms 6] [--seconds 4] [--rounds 3]

Both sleep: the target in the engine's thread, the proposer in its own, behind a real socket. A tiny network makes
the tokens, and trees of two random nodes are hardly ever accepted. Two kinds of costs: the same for any number of
sequences, and by their number, the same for all of them together. What is printed is a table in Markdown: milliseconds
for a step of every sequence.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle2.config import Overlap, load_settings
from eagle2.engine.assemble import Checkpoint, load_checkpoint, load_target_model
from eagle2.engine.engine import Engine, EngineLimits
from eagle2.engine.pair import Pair
from eagle2.engine.target import TargetRunner
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.measure import bench_request
from eagle2.models.dtype import use_threads
from eagle2.models.rows import Rows
from eagle2.models.target import TargetModel
from eagle2.models.tiny import write_tiny_target
from eagle2.protocol import GenerationRequest
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.transport.base import ProposerLink
from eagle2.transport.messages import DraftReply, DraftStatus, DraftStep, DraftTree
from eagle2.transport.node import NodeLink
from eagle2.transport.server import NodeServer

Cost = Callable[[int], float]
"""Seconds for so many sequences."""

_INCARNATION = 1
_SHAPE = TreeShape(1, 2, 3)


class _SleepingTarget(TargetRunner):
    """A forward and its logits last ``verify_s`` seconds, or as long as the tiny network takes."""

    def __init__(self, model: TargetModel, num_slots: int, verify_s: Cost) -> None:
        super().__init__(model, num_slots)
        self._verify_s, self._until = verify_s, 0.0

    def forward(self, rows: Rows) -> Tensor:
        self._until = time.perf_counter() + self._verify_s(len(rows.starts) - 1)
        return super().forward(rows)

    def logits(self, features: Tensor, wanted: Sequence[int] | None = None) -> Tensor:
        logits = super().logits(features, wanted)
        _sleep_until(self._until)
        return logits


class _SleepingProposer:
    """A ``DraftHandler`` that takes ``draft_s`` seconds for trees of random tokens."""

    def __init__(self, draft_s: Cost, vocab_size: int) -> None:
        self._draft_s, self._vocab_size = draft_s, vocab_size
        self._random = torch.Generator().manual_seed(0)

    def handle(self, step: DraftStep) -> DraftReply:
        received = time.time_ns()
        until = time.perf_counter() + self._draft_s(sum(entry.draft for entry in step.entries))
        trees = []
        for entry in step.entries:
            status, nodes = (DraftStatus.OK, 2) if entry.draft else (DraftStatus.SYNCED, 0)
            tokens = torch.randperm(self._vocab_size, generator=self._random)[:nodes]
            held = entry.base + len(entry.tokens)
            parents, scores = torch.zeros(nodes, dtype=torch.int64), torch.full((nodes,), -1.0)
            trees.append(DraftTree(entry.sequence, entry.cycle, status, held, tokens, parents, scores))
        _sleep_until(until)
        return DraftReply(_INCARNATION, step.step, tuple(trees), received, time.time_ns(), 0, 1)

    def reset(self) -> None:
        pass


class _AwaitingLink:
    """Sends a step and waits for its reply: nothing overlaps."""

    def __init__(self, inner: ProposerLink) -> None:
        self._inner, self.incarnation = inner, inner.incarnation
        self._reply: DraftReply | None = None

    def send(self, step: DraftStep) -> None:
        self._inner.send(step)
        self._reply = self._inner.receive(30.0)

    def receive(self, timeout_s: float) -> DraftReply | None:  # noqa: ARG002  (it is there already)
        reply, self._reply = self._reply, None
        return reply

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True, slots=True)
class _Way:
    name: str
    overlap: Overlap
    is_awaiting: bool = False


_WAYS = (
    _Way("the whole batch", "off"),
    _Way("two halves, one after the other", "on", is_awaiting=True),
    _Way("two halves, overlapped", "on"),
)
_AUTO = _Way("auto", "auto")


class _Bench:
    """Runs a way with costs for a while, each time with a new engine and a new pair."""

    def __init__(self, checkpoint: Checkpoint, model: TargetModel, sequences: int) -> None:
        self._checkpoint, self._model, self._sequences = checkpoint, model, sequences

    def run(self, way: _Way, draft_s: Cost, verify_s: Cost, seconds: float) -> tuple[float, float]:
        """Seconds for a step of every sequence, and the share of steps that were overlapped; over the second half of
        the time, so that whatever is to be decided has been."""
        with tempfile.TemporaryDirectory(prefix="e2") as folder:
            path = Path(folder) / "p.sock"
            server = NodeServer(path, _SleepingProposer(draft_s, 258), _INCARNATION, fingerprint="stub")
            try:
                return self._measure(self._engine(way, path, verify_s), seconds)
            finally:
                server.close()

    def _engine(self, way: _Way, path: Path, verify_s: Cost) -> Engine:
        def connect() -> ProposerLink:
            link = NodeLink.connect(path, verifier_incarnation=2, fingerprint="stub", timeout_s=10.0)
            return _AwaitingLink(link) if way.is_awaiting else link

        stats, longest = Recorder(), self._checkpoint.max_model_len
        pair = Pair(connect, stats, incarnation=2, timeout_s=10.0)
        engine = Engine(
            _SleepingTarget(self._model, self._sequences * (longest + 8), verify_s),
            self._checkpoint.tokenizer,
            pair,
            stats,
            EngineLimits(longest, self._sequences, 64),
            _SHAPE,
            frozenset(),
            overlap=way.overlap,
        )
        while not pair.poll():
            time.sleep(0.01)
        return engine

    def _measure(self, engine: Engine, seconds: float) -> tuple[float, float]:
        running = [engine.submit(self._request(i), lambda _: None) for i in range(self._sequences)]
        _run(engine, seconds / 2)
        cycles = sum(sequence.num_cycles for sequence in running)
        counted = (metrics.OVERLAPPED_STEPS, metrics.CYCLES)
        before = [engine.stats.get(metric) for metric in counted]
        taken = _run(engine, seconds / 2)
        rounds = (sum(sequence.num_cycles for sequence in running) - cycles) / self._sequences
        overlapped, steps = (engine.stats.get(metric) - old for metric, old in zip(counted, before, strict=True))
        assert all(sequence.finish_reason is None for sequence in running), "a generation ended: run for less seconds"
        engine.stop()
        return taken / rounds, overlapped / steps

    def _request(self, number: int) -> GenerationRequest:
        longest = self._checkpoint.max_model_len
        return bench_request([1, 3 + number], longest - 2, speculation=True, name=str(number))


def _run(engine: Engine, seconds: float) -> float:
    """Step for a while; the seconds that it was."""
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        engine.step()
    return time.perf_counter() - began


def _sleep_until(until: float) -> None:
    left = until - time.perf_counter()
    if left > 0:
        time.sleep(left)


def main() -> None:
    parser = argparse.ArgumentParser(description="Overlap between a proposer and a target that only take time.")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--draft-ms", type=float, default=3.0)
    parser.add_argument("--verify-ms", type=float, default=6.0)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="for each way and round; auto needs six times as long"
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    use_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        target = write_tiny_target(Path(folder) / "tiny", max_position_embeddings=8192, num_layers=1)
        settings = load_settings({"model": {"target": str(target), "draft": None, "dtype": "float32"}})
        checkpoint = load_checkpoint(settings.model)
        bench = _Bench(checkpoint, load_target_model(settings, checkpoint), arguments.sequences)
        draft_s, verify_s = arguments.draft_ms / 1e3, arguments.verify_ms / 1e3
        kinds: dict[str, tuple[Cost, Cost]] = {
            "the same for any number": (lambda _: draft_s, lambda _: verify_s),
            "by the number": (
                lambda number: draft_s * number / arguments.sequences,
                lambda number: verify_s * number / arguments.sequences,
            ),
        }
        print(Conditions.now(load))
        print("\n| costs | way | ms a round, median | least, most | overlapped steps |\n|---|---|---:|---:|---:|")
        for kind, costs in kinds.items():
            found: dict[str, list[tuple[float, float]]] = {way.name: [] for way in (*_WAYS, _AUTO)}
            for _ in range(arguments.rounds):
                for way in (*_WAYS, _AUTO):
                    found[way.name].append(bench.run(way, *costs, arguments.seconds * (6 if way is _AUTO else 1)))
            for name, runs in found.items():
                times = np.array([1e3 * seconds for seconds, _ in runs])
                share = np.median([share for _, share in runs])
                print(
                    f"| {kind} | {name} | {np.median(times):.2f} | {times.min():.2f}, {times.max():.2f} | {share:.0%} |"
                )


if __name__ == "__main__":
    main()
