"""Where a step's time goes on a CPU, and how far a plain step is from reading the weights once.

    python benchmarks/profile.py [--dtype bfloat16] [--threads 2] [--context 200] [--rounds 20] [--cpu-time]

The embedded model; the parts take turns and the least of all rounds counts, since other work only adds.
``--cpu-time`` with ``--threads 1`` measures processor time, for a machine that is busy. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.nn import functional as F

from eagle2.config import Settings, load_settings
from eagle2.engine.assemble import load_checkpoint
from eagle2.engine.batch import RowsBuilder
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.report import conditions_lines
from eagle2.kv_cache.slots import SlotPool, SlotTable
from eagle2.models.attention import KVPool
from eagle2.models.dtype import use_threads
from eagle2.models.fused import row_linear
from eagle2.models.rows import Rows
from eagle2.models.target import TargetModel

_SIZES = (1, 10, 18, 32, 60)
_SLOTS = 8192
Action = Callable[[], object]


class Sequence:
    """One sequence in a pool of its own: ``context`` tokens are read, trees behind them are thrown away."""

    def __init__(self, model: TargetModel, context: int) -> None:
        self.model = model
        self.pool: KVPool = model.new_pool(_SLOTS)
        self._slots = SlotPool(_SLOTS)
        self._table = SlotTable(self._slots)
        for first in range(0, context, 256):
            model.forward(self.prompt(min(256, context - first)), self.pool)

    def prompt(self, count: int) -> Rows:
        first = len(self._table)
        self._table.extend(count)
        builder = RowsBuilder()
        builder.add_span(self._table.slots, first, [7] * count)
        return builder.build(self.model.device)

    def tree(self, size: int) -> Rows:
        """A root with ``size`` - 1 children."""
        slots = self._slots.allocate(size)
        depths = np.minimum(np.arange(size), 1)
        paths = np.stack([np.full(size, slots[0]), np.where(depths == 1, slots, -1)], axis=1).astype(np.int32)
        builder = RowsBuilder()
        builder.add_nodes(self._table.slots, [5] * size, depths, paths)
        self._slots.release(slots)
        return builder.build(self.model.device)


def least(actions: Mapping[str, Action], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of each action, the least of so many rounds in which they take turns."""
    found = dict.fromkeys(actions, float("inf"))
    for number in range(rounds + 1):
        for name, action in actions.items():
            began = clock()
            action()
            if number:  # the first round is for what is compiled or allocated once
                found[name] = min(found[name], clock() - began)
    return found


def _linears(model: TargetModel) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's products."""
    config = model.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv": (queries + 2 * keys, config.hidden_size),
        "output": (config.hidden_size, queries),
        "gate and up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    use_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    settings: Settings = load_settings(flags={"model": {"dtype": args.dtype}}, environ=False)
    checkpoint = load_checkpoint(settings.model)
    model = TargetModel(checkpoint.config, checkpoint.weights, dtype=checkpoint.dtype, max_positions=_SLOTS)
    own, empty = Sequence(model, args.context), Sequence(model, 0)
    own_rows = {size: own.tree(size) for size in _SIZES}
    bare_rows = {size: empty.tree(size) for size in _SIZES}
    features = {size: model.forward(rows, own.pool) for size, rows in own_rows.items()}

    layers, size = model.config.num_layers, model.dtype.itemsize
    shapes = _linears(model)
    stacks = {name: [row_linear(_random(shape, model.dtype)) for _ in range(layers)] for name, shape in shapes.items()}
    inputs = {name: {n: _random((n, shape[1]), model.dtype) for n in _SIZES} for name, shape in shapes.items()}
    numbers = layers * sum(outputs * width for outputs, width in shapes.values()) + model.head_weight.numel()
    # As many bytes as a step reads, from memory that nobody else uses.
    block = torch.ones(numbers * size // 4)

    def products(name: str, n: int) -> Action:
        return lambda: [linear(inputs[name][n]) for linear in stacks[name]]

    actions: dict[str, Action] = {"read": lambda: block.sum()}
    for n in _SIZES:
        actions[f"rows {n}"] = lambda n=n: own.tree(n)  # type: ignore[misc]
        actions[f"forward {n}"] = lambda n=n: model.forward(own_rows[n], own.pool)  # type: ignore[misc]
        actions[f"bare {n}"] = lambda n=n: model.forward(bare_rows[n], empty.pool)  # type: ignore[misc]
        actions[f"logits {n}"] = lambda n=n: model.logits(features[n])  # type: ignore[misc]
        logits = model.logits(features[n])
        actions[f"best {n}"] = lambda logits=logits: logits.max(dim=1).indices.tolist()  # type: ignore[misc]
        for name in shapes:
            actions[f"{name} {n}"] = products(name, n)
    found = least(actions, args.rounds, clock)
    bandwidth = numbers * size / found["read"]
    print(f"{args.dtype}, context {args.context}, milliseconds by rows of a step:\n")
    print("| | " + " | ".join(str(n) for n in _SIZES) + " |\n|---|" + "---:|" * len(_SIZES))
    _row("the batch's arrays", [found[f"rows {n}"] for n in _SIZES])
    for name in shapes:
        _row(f"{layers} x {name}, called one by one", [found[f"{name} {n}"] for n in _SIZES])
    _row("all layers in one kernel", [found[f"forward {n}"] for n in _SIZES])
    _row("of it the context's attention", [found[f"forward {n}"] - found[f"bare {n}"] for n in _SIZES])
    _row("logits", [found[f"logits {n}"] for n in _SIZES])
    _row("best tokens", [found[f"best {n}"] for n in _SIZES])
    whole = {n: sum(found[f"{part} {n}"] for part in ("rows", "forward", "logits", "best")) for n in _SIZES}
    _row("**a step**", [whole[n] for n in _SIZES])
    _row("**as plain steps**", [whole[n] / whole[1] / 1000 for n in _SIZES])
    read = f"{numbers * size / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s (a sum over as many bytes)"
    print(
        f"\n{read} are {found['read'] * 1000:.1f} ms: a plain step takes {whole[1] / found['read']:.2f} times as long."
    )
    method = f"least of {args.rounds} rounds{', processor time' if args.cpu_time else ''}"
    print(f"\n{conditions_lines(Conditions.now(load), method=method)}")


def _random(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return F.normalize(torch.randn(shape)).to(dtype)


def _row(name: str, seconds: list[float]) -> None:
    print(f"| {name} | " + " | ".join(f"{1000 * value:.2f}" for value in seconds) + " |")


if __name__ == "__main__":
    main()
