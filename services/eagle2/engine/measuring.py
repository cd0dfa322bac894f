"""Measures what steps cost before there is work: the target's forward by its rows, and the pair's trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from eagle2.engine.batch import RowsBuilder
from eagle2.engine.costs import CostCurve, DraftCost, StepCosts, sizes_up_to
from eagle2.engine.pair import Pair
from eagle2.engine.target import TargetRunner
from eagle2.kv_cache.slots import SlotTable
from eagle2.speculative.draft import TreeShape
from eagle2.transport.messages import DraftEntry, DraftStatus

Clock = Callable[[], float]
_CONTEXT, _LONGER = 128, 1024  # tokens before the measured rows; a longer context shows what each position takes
_ROUNDS = 5  # of which the least counts: what else a machine does only adds
_ENOUGH_S = 4.0  # after which there is no further round


def measure_target(target: TargetRunner, most: int, *, clock: Clock = time.perf_counter) -> StepCosts:
    """Seconds of a forward of up to ``most`` nodes of one tree, logits and the choice of tokens included.

    Sizes that do not fit into the pool beside a short context are left out, the smallest never.
    """
    tiles = target.model.row_tiles
    context = min(_CONTEXT, target.pool.num_free // 4)
    sizes = [size for size in sizes_up_to(most, tiles) if context + size <= target.pool.num_free] or [1]
    curve = CostCurve(sizes, _least_seconds(target, context, sizes, clock), tiles=tiles)
    longer = min(_LONGER, target.pool.num_free // 4)
    probe = sizes[min(1, len(sizes) - 1)]
    if longer <= context:
        return StepCosts(curve, context)
    [seconds] = _least_seconds(target, longer, [probe], clock)
    return StepCosts(curve, context, max(seconds - curve.at(probe), 0.0) / (probe * (longer - context)))


def _least_seconds(target: TargetRunner, context: int, sizes: Sequence[int], clock: Clock) -> list[float]:
    """Of several rounds over all ``sizes``, behind ``context`` positions."""
    table = SlotTable(target.pool)
    for begin in range(0, context, _CONTEXT):
        count = min(_CONTEXT, context - begin)
        builder = RowsBuilder()
        table.extend(count)
        builder.add_span(table.slots, begin, [0] * count)
        target.forward(builder.build(target.device))
    seconds: list[list[float]] = [[] for _ in sizes]
    start = clock()
    for number in range(_ROUNDS + 1):
        if number > 1 and clock() - start > _ENOUGH_S:
            break
        for size, taken in zip(sizes, seconds, strict=True):
            began = clock()
            _run_tree(target, table, size)
            if number:  # the first round is for kernels that are still to be compiled
                taken.append(clock() - began)
    table.free()
    return [min(taken) for taken in seconds]


def _run_tree(target: TargetRunner, table: SlotTable, size: int) -> None:
    """A root with ``size`` - 1 children behind the table's tokens."""
    slots = target.pool.allocate(size)
    depths = np.minimum(np.arange(size), 1)
    paths = np.stack([np.full(size, slots[0]), np.where(depths == 1, slots, -1)], axis=1).astype(np.int32)
    builder = RowsBuilder()
    builder.add_nodes(table.slots, [0] * size, depths, paths)
    logits = target.logits(target.forward(builder.build(target.device)))
    logits.max(dim=1).indices.tolist()  # waits for a device that runs behind
    target.pool.release(slots)


def measure_pair(
    pair: Pair, target: TargetRunner, bounds: TreeShape, max_sequences: int, *, clock: Clock = time.perf_counter
) -> list[DraftCost]:
    """How long trees of a few shapes take for one sequence and for many; nothing where the proposer gives none."""
    batches = sorted({1, max_sequences})
    widths = {1, max(1, bounds.top_k // 2), bounds.top_k}
    shapes = sorted({(1, bounds.top_k), *((bounds.depth, k) for k in widths)})
    found: dict[tuple[int, int, int], list[float]] = {}
    cycle, start = 0, clock()
    for number in range(_ROUNDS + 1):
        if number > 1 and clock() - start > _ENOUGH_S:
            break
        for sequences in batches:
            for depth, top_k in shapes:
                cycle += 1
                features = torch.zeros(1, target.model.config.hidden_size, dtype=target.model.dtype)
                entries = [
                    DraftEntry(-1 - i, cycle, 0, features, torch.zeros(1, dtype=torch.int64)) for i in range(sequences)
                ]
                began = clock()
                trees = pair.draft(entries, TreeShape(depth, top_k, bounds.num_nodes))
                taken = clock() - began
                if len(trees) < sequences or any(tree.status != DraftStatus.OK for tree in trees.values()):
                    continue
                if number:
                    found.setdefault((sequences, depth, top_k), []).append(taken)
    for i in range(max_sequences):
        pair.forget(-1 - i)
    pair.flush()
    return [
        DraftCost(sequences, depth, sequences * top_k, min(taken)) for (sequences, depth, top_k), taken in found.items()
    ]
