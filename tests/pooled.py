"""Sequences of a target or a draft head in a slot pool, row by row under the control of a test.

The pool's slots are handed out in random order and its memory begins as NaN, so that a slot that is read without
having been written shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.kv_cache.slots import SlotPool, Slots, SlotTable
from eagle2.models.attention import KVPool, rotated
from eagle2.models.draft import DraftModel
from eagle2.models.rows import Rows
from eagle2.models.target import TargetModel


@dataclass
class Span:
    """Tokens that are appended to a sequence; inputs: (T, H), a draft head's features."""

    table: SlotTable
    tokens: Sequence[int]
    inputs: Tensor | None = None


@dataclass
class Nodes:
    """Tree nodes behind a sequence, by parent (-1: the committed text itself). ``slots`` are set by the forward."""

    table: SlotTable
    tokens: Sequence[int]
    parents: Sequence[int]
    inputs: Tensor | None = None
    slots: Slots = field(default_factory=lambda: np.empty(0, np.int32))

    def path(self, node: int) -> list[int]:
        """Nodes from the first level down to ``node``, itself included."""
        above = self.parents[node]
        return [*(self.path(above) if above >= 0 else []), node]


class Pooled:
    """One model, one pool, any number of sequences."""

    def __init__(self, model: TargetModel | DraftModel, num_slots: int = 2048, seed: int = 0) -> None:
        self.model = model
        self.pool = shuffled_pool(num_slots, seed)
        self.kv = model.new_pool(num_slots)
        self.kv.keys.fill_(torch.nan)
        self.kv.values.fill_(torch.nan)

    def table(self) -> SlotTable:
        return SlotTable(self.pool)

    def start(self, *texts: Sequence[int]) -> list[SlotTable]:
        """New sequences of a target, prefilled."""
        tables = [self.table() for _ in texts]
        self.forward(*(Span(table, text) for table, text in zip(tables, texts, strict=True) if len(text)))
        return tables

    def forward(self, *parts: Span | Nodes) -> list[Tensor]:
        """One forward of all parts together: the features of each."""
        if not parts:
            return []
        builder = RowsBuilder()
        for part in parts:
            if isinstance(part, Span):
                first = len(part.table)
                part.table.extend(len(part.tokens))
                builder.add_span(part.table.slots.copy(), first, part.tokens)
                continue
            part.slots = self.pool.allocate(len(part.tokens))
            paths = [part.path(node) for node in range(len(part.tokens))]
            rows = np.full((len(paths), max(map(len, paths))), -1, np.int32)
            for row, path in zip(rows, paths, strict=True):
                row[: len(path)] = part.slots[path]
            builder.add_nodes(part.table.slots.copy(), part.tokens, np.array([len(p) - 1 for p in paths]), rows)
        out = self._run(builder.build(self.model.device), [part.inputs for part in parts if part.inputs is not None])
        return list(out.split([len(part.tokens) for part in parts]))

    def drop(self, nodes: Nodes) -> None:
        self.pool.release(nodes.slots)

    def _run(self, rows: Rows, inputs: list[Tensor]) -> Tensor:
        if isinstance(self.model, DraftModel):
            return self.model.forward(rows, torch.cat(inputs), self.kv)
        return self.model.forward(rows, self.kv)


def shuffled_pool(num_slots: int, seed: int) -> SlotPool:
    """A pool that hands out its slots in random order."""
    pool = SlotPool(num_slots)
    for slot in np.random.default_rng(seed).permutation(pool.allocate(num_slots)):
        pool.release(np.array([slot], np.int32))
    return pool


def softmax_attention(rows: Rows, qkv: Tensor, cos: Tensor, sin: Tensor, pool: KVPool, heads: int) -> Tensor:
    """What attention should give, (T, heads * D): row by row rotate, write, then softmax over what the row sees, in
    float64. The pool stays as it is."""
    kv_heads, dim = pool.keys.shape[2:]
    keys, values = pool.keys[0].clone(), pool.values[0].clone()
    q, k, v = qkv.view(len(rows), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    slots = rows.slots.long()
    keys[slots], values[slots] = k.to(keys.dtype), v
    out = []
    for sequence, (begin, end) in enumerate(pairwise(rows.starts.tolist())):
        for row in range(begin, end):
            table = rows.tables[sequence, : int(rows.lengths[row])]
            seen = torch.cat([table, rows.paths[row, : int(rows.path_lengths[row])]]).long()
            groups = q[row].double().view(kv_heads, -1, dim)
            scores = torch.einsum("hgd,lhd->hgl", groups, keys[seen].double()) / math.sqrt(dim)
            out.append(torch.einsum("hgl,lhd->hgd", scores.softmax(-1), values[seen].double()).flatten())
    return torch.stack(out)


def random_parents(generator: np.random.Generator, count: int) -> list[int]:
    """A tree of ``count`` nodes in random shape: node 0 is the root, every parent comes before its child."""
    return [-1, *(int(generator.integers(max(0, node - 6), node)) for node in range(1, count))]
