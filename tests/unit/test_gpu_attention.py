"""The GPU's attention kernels, interpreted on a CPU, against softmax written out in float64.

Bfloat16 is not among the dtypes: the interpreter multiplies its bits as if they were whole numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle2.engine.batch import RowsBuilder
from eagle2.models.attention import KVPool, RowLayout
from eagle2.models.rows import Rows
from tests.pooled import random_parents, shuffled_pool, softmax_attention

pytest.importorskip("triton", reason="Triton is not installed")

# Heads, key/value heads, their size: in pairs, in threes of an odd size, each with keys of its own.
CASES = [((4, 2, 16), torch.float32), ((3, 1, 12), torch.float32), ((2, 2, 32), torch.float16)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def attention() -> Iterator[ModuleType]:
    """The module with kernels that Triton interprets, in small blocks so that few numbers have many borders."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU is here: tests/gpu run the compiled kernels")
    from eagle2.models import gpu_attention

    patched = pytest.MonkeyPatch()
    for name, size in {"BLOCK_M": 16, "BLOCK_N": 16, "PART": 32}.items():
        patched.setattr(gpu_attention, name, size)
    yield gpu_attention
    patched.undo()


class Batch:
    """Random rows: a prompt of 21 tokens behind 20 cached ones, a tree behind each context, a root alone at the start.

    The contexts end before, at and behind borders of blocks (16 positions) and of parts (32).
    """

    prompt = (20, 21)
    contexts = (16, 33, 64, 0)
    trees = (9, 4, 1, 1)

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, *, only: int | None = None) -> None:
        """only: rows of this sequence alone, with the same numbers as beside the others."""
        generator = torch.Generator().manual_seed(0)
        slots = shuffled_pool(512, 0)
        self.heads, self.pool = heads, KVPool(1, 512, kv_heads, dim, dtype, torch.device("cpu"))
        self.pool.keys.copy_(torch.randn(self.pool.keys.shape, generator=generator))
        self.pool.values.copy_(torch.randn(self.pool.values.shape, generator=generator))
        builder = RowsBuilder()
        sequence, kept = 0, []

        def wanted(count: int) -> bool:
            nonlocal sequence
            here = only is None or sequence == only
            kept.extend([here] * count)
            sequence += 1
            return here

        first, count = self.prompt
        table = slots.allocate(first + count)
        if wanted(count):
            builder.add_span(table, first, [0] * count)
        random = np.random.default_rng(0)
        for length, nodes in zip(self.contexts, self.trees, strict=True):
            table, own = slots.allocate(length), slots.allocate(nodes)
            paths: list[list[int]] = []
            for node, parent in enumerate(random_parents(random, nodes)):
                paths.append([*(paths[parent] if parent >= 0 else []), node])
            padded = np.full((nodes, max(map(len, paths))), -1, np.int32)
            for row, path in zip(padded, paths, strict=True):
                row[: len(path)] = own[path]
            if wanted(nodes):
                builder.add_nodes(table, [0] * nodes, np.array([len(path) - 1 for path in paths]), padded)
        self.rows = builder.build(torch.device("cpu"))
        here, width = torch.tensor(kept), (heads + 2 * kv_heads) * dim
        self.qkv = torch.randn(len(kept), width, generator=generator).to(dtype)[here]
        angles = torch.randn(len(kept), dim // 2, generator=generator)[here]
        self.cos, self.sin = angles.cos(), angles.sin()

    def attend(self, attention: ModuleType, *, split: bool, rows: Rows | None = None, padding: int = 0) -> Tensor:
        qkv, cos, sin = (F.pad(part, (0, 0, 0, padding)) for part in (self.qkv, self.cos, self.sin))
        layout = attention.GpuRowLayout(rows or self.rows, split=split)
        out: Tensor = layout.attend(qkv, cos, sin, self.pool.keys[0], self.pool.values[0], self.heads)
        return out

    def expected(self) -> Tensor:
        return softmax_attention(self.rows, self.qkv, self.cos, self.sin, self.pool, self.heads)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
def test_prompts_and_trees_against_softmax(
    attention: ModuleType, heads: tuple[int, int, int], dtype: torch.dtype, split: bool
) -> None:
    batch = Batch(*heads, dtype)
    expected = batch.expected()
    out = batch.attend(attention, split=split)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_keys_and_values_are_written_as_the_cpu_writes_them(attention: ModuleType) -> None:
    ours, cpus = Batch(4, 2, 16, torch.float32), Batch(4, 2, 16, torch.float32)
    out = ours.attend(attention, split=False)
    layout = RowLayout(cpus.rows, len(cpus.rows), 1)
    expected = layout.attend(cpus.qkv, cpus.cos, cpus.sin, cpus.pool, 0, cpus.heads)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(ours.pool.keys, cpus.pool.keys, atol=1e-6, rtol=1e-6)
    assert torch.equal(ours.pool.values, cpus.pool.values)


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_a_row_alone_has_the_bits_that_it_has_in_the_batch(attention: ModuleType, sequence: int) -> None:
    """In tiles and parts of their own too: one row, a tree, or a prompt that ends within a tile."""
    together = Batch(4, 2, 16, torch.float32)
    begin, end = together.rows.starts[sequence : sequence + 2].tolist()
    out = together.attend(attention, split=False)[begin:end]
    alone = Batch(4, 2, 16, torch.float32, only=sequence).attend(attention, split=True)
    assert torch.equal(alone, out)


def padded(rows: Rows, count: int, sequences: int) -> Rows:
    """``count`` more rows that belong to nobody, and empty sequences, as a recorded forward has them."""
    more = (0, count)
    return Rows(
        tokens=F.pad(rows.tokens, more),
        positions=F.pad(rows.positions, more),
        slots=F.pad(rows.slots, more, value=-1),
        starts=F.pad(rows.starts, (0, sequences), value=len(rows)),
        tables=F.pad(rows.tables, (0, 100, 0, sequences)),
        lengths=F.pad(rows.lengths, more),
        paths=F.pad(rows.paths, (0, 3, 0, count), value=-1),
        path_lengths=F.pad(rows.path_lengths, more),
    )


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_padding_writes_nothing_and_changes_nothing(attention: ModuleType, split: bool) -> None:
    plain, batch = Batch(4, 2, 16, torch.float32), Batch(4, 2, 16, torch.float32)
    expected = plain.attend(attention, split=split)
    out = batch.attend(attention, split=split, rows=padded(batch.rows, 11, 3), padding=11)
    assert torch.equal(out[: len(expected)], expected)
    assert not out[len(expected) :].any()
    assert torch.equal(batch.pool.keys, plain.pool.keys)
    assert torch.equal(batch.pool.values, plain.pool.values)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_node_that_is_no_number_spoils_only_what_sees_it(attention: ModuleType, split: bool) -> None:
    clean = Batch(4, 2, 16, torch.float32).attend(attention, split=split)
    batch = Batch(4, 2, 16, torch.float32)
    begin, end = batch.rows.starts[1:3].tolist()
    row = begin + 2
    batch.qkv[row] = torch.nan
    slot = int(batch.rows.slots[row])
    sees = [slot in batch.rows.paths[other, : int(batch.rows.path_lengths[other])] for other in range(len(clean))]
    out = batch.attend(attention, split=split)
    assert out[torch.tensor(sees)].isnan().all()
    assert torch.equal(out[~torch.tensor(sees)], clean[~torch.tensor(sees)])
    assert sum(sees[begin:end]) < end - begin
