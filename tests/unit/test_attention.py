"""Attention over a slot pool: the kernels and the gathered way against softmax written out, and NaN kept at home."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.models import kernels
from eagle2.models.attention import KVPool, RowLayout, as_array
from eagle2.models.rows import Rows
from tests.pooled import random_parents, shuffled_pool, softmax_attention

HEADS = [(4, 4, 16), (6, 2, 32), (3, 1, 64), (4, 2, 12), (2, 1, 2)]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


class Batch:
    """Random rows: sequence 0 prefills, 1 has a tree, 2 has a long chain across blocks, 3 decodes one token."""

    contexts = (0, 62, 130, 64)

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        slots = shuffled_pool(1024, seed)
        self.heads, self.pool = heads, KVPool(1, 1024, kv_heads, dim, dtype, torch.device("cpu"))
        self.pool.keys.copy_(torch.randn(self.pool.keys.shape, generator=generator))
        self.pool.values.copy_(torch.randn(self.pool.values.shape, generator=generator))
        self.tables = [slots.allocate(length) for length in self.contexts]
        self.tables[0] = slots.allocate(90)
        self.trees = [[], random_parents(np.random.default_rng(seed), 20), list(range(-1, 79)), [-1]]
        self.sizes = [90, *(len(parents) for parents in self.trees[1:])]
        builder = RowsBuilder()
        builder.add_span(self.tables[0], 0, [0] * 90)
        for table, parents in zip(self.tables[1:], self.trees[1:], strict=True):
            own = slots.allocate(len(parents))
            paths: list[list[int]] = []
            for node, parent in enumerate(parents):
                paths.append([*(paths[parent] if parent >= 0 else []), node])
            padded = np.full((len(paths), max(map(len, paths))), -1, np.int32)
            for row, path in zip(padded, paths, strict=True):
                row[: len(path)] = own[path]
            builder.add_nodes(table, [0] * len(parents), np.array([len(path) - 1 for path in paths]), padded)
        self.rows = builder.build(torch.device("cpu"))
        total = len(self.rows)
        self.qkv = torch.randn(total, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
        angles = torch.randn(total, dim // 2, generator=generator)
        self.cos, self.sin = angles.cos(), angles.sin()

    def attend(self, threads: int = 1, padding: int = 3) -> Tensor:
        total = len(self.rows)
        layout = RowLayout(self.rows, total + padding, threads)
        return self._attend(layout, padding)

    def gathered(self, padding: int = 3) -> Tensor:
        """The way of other devices, here on the CPU."""
        return self._attend(GatheredLayout(self.rows, len(self.rows) + padding, 1), padding)

    def _attend(self, layout: RowLayout, padding: int) -> Tensor:
        more = (0, 0, 0, padding)
        qkv, cos, sin = (torch.nn.functional.pad(part, more) for part in (self.qkv, self.cos, self.sin))
        out = layout.attend(qkv, cos, sin, self.pool, 0, self.heads)
        assert out.shape == (len(self.rows) + padding, self.heads * self.pool.keys.shape[3])
        assert not out[len(self.rows) :].any()
        assert out.dtype == self.qkv.dtype
        return out[: len(self.rows)]

    def expected(self) -> Tensor:
        return softmax_attention(self.rows, self.qkv, self.cos, self.sin, self.pool, self.heads)


class GatheredLayout(RowLayout):
    def __init__(self, rows: Rows, padded: int, threads: int) -> None:
        from eagle2.models.attention import _visible_slots

        super().__init__(rows, padded, threads)
        self.on_cpu = False
        self._visible = _visible_slots(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_both_ways_are_softmax(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    batch = Batch(heads, kv_heads, dim, dtype)
    expected = batch.expected()
    torch.testing.assert_close(batch.attend().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    written = batch.pool.keys.clone(), batch.pool.values.clone()
    again = Batch(heads, kv_heads, dim, dtype)
    gathered = again.gathered().double()
    # Here the queries are rounded to the pool's format as well.
    torch.testing.assert_close(gathered, expected, atol=3 * TOLERANCE[dtype], rtol=3 * TOLERANCE[dtype])
    torch.testing.assert_close(again.pool.keys, written[0], atol=1e-6, rtol=1e-2 if dtype != torch.float32 else 1e-6)
    assert torch.equal(again.pool.values, written[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_how_the_work_is_cut_changes_no_bit(dtype: torch.dtype) -> None:
    expected = Batch(6, 2, 32, dtype).attend(threads=1)
    for threads in (2, 5, 7, 64):
        assert torch.equal(Batch(6, 2, 32, dtype).attend(threads=threads, padding=threads), expected)


@pytest.mark.parametrize("way", ["attend", "gathered"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_numbers_that_are_none_stay_in_their_sequence(dtype: torch.dtype, broken: float, way: str) -> None:
    clean = getattr(Batch(6, 2, 32, dtype), way)()
    for sequence in range(4):
        batch = Batch(6, 2, 32, dtype)
        begin, end = batch.rows.starts[sequence : sequence + 2].tolist()
        batch.qkv[begin:end] = broken
        batch.pool.keys[0, batch.tables[sequence]] = broken
        batch.pool.values[0, batch.tables[sequence]] = broken
        others = torch.ones(len(clean), dtype=torch.bool)
        others[begin:end] = False
        out = getattr(batch, way)()
        assert not out[begin:end].isfinite().any()
        assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("way", ["attend", "gathered"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_a_broken_row_spoils_only_what_sees_it(dtype: torch.dtype, way: str) -> None:
    """Neither earlier rows of a prefill nor the siblings in a tree, whatever stands beside them in a block."""
    clean = getattr(Batch(6, 2, 32, dtype), way)()
    for row in (0, 37, 88, 92, 100, 109, 140, 180):
        batch = Batch(6, 2, 32, dtype)
        batch.qkv[row] = torch.nan
        slot = int(batch.rows.slots[row])
        starts = batch.rows.starts.tolist()
        sees = torch.zeros(len(clean), dtype=torch.bool)
        for sequence, (begin, end) in enumerate(pairwise(starts)):
            for other in range(begin, end):
                context = batch.rows.tables[sequence, : int(batch.rows.lengths[other])].tolist()
                path = batch.rows.paths[other, : int(batch.rows.path_lengths[other])].tolist()
                sees[other] = slot in [*context, *path]
        assert sees.any()
        out = getattr(batch, way)()
        assert out[sees].isnan().all()
        assert torch.equal(out[~sees], clean[~sees])


def stored(values: Tensor) -> Tensor:
    """What the kernels make of (T, D) float32 numbers in a bfloat16 pool; D is even, the angle 0."""
    rows, dim = values.shape
    keys, kept = (np.zeros((rows, 1, dim), np.uint16) for _ in range(2))
    qkv = torch.cat([values, values, values], dim=1).numpy()
    ones, zeros = np.ones((rows, dim // 2), np.float32), np.zeros((rows, dim // 2), np.float32)
    query = np.zeros((rows, 1, dim), np.float32)
    kernels.rotate_and_store(qkv, ones, zeros, np.arange(rows, dtype=np.int32), keys, kept, query)
    return torch.from_numpy(kept[:, 0]).view(torch.bfloat16)


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """Every upper half with lower halves around the tie, random numbers, and what is no number."""
    upper = torch.arange(65536, dtype=torch.int64).unsqueeze(1) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper + lower).flatten()
    drawn = torch.randint(0, 1 << 32, (100_000,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat([bits, drawn])
    values = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    result = stored(values.view(-1, 2)).flatten()
    expected = values.to(torch.bfloat16)
    assert torch.equal(result.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(result[number].view(torch.int16), expected[number].view(torch.int16))
    assert int(expected.isinf().sum()) > 2  # numbers that round to infinity are among them


@njit
def _exp_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        out[i] = kernels._exp(x[i])


def test_exp_is_good_to_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 400_001).astype(np.float32)
    x = np.concatenate([x, np.array([0.0, -0.0, 1e-30, -1e-7, 0.5 * math.log(2), -0.5 * math.log(2)], np.float32)])
    out = np.empty_like(x)
    _exp_all(x, out)
    expected = np.exp(x.astype(np.float64))
    unit = np.spacing(expected.astype(np.float32)).astype(np.float64)
    assert (np.abs(out.astype(np.float64) - expected) <= 2 * unit).all()
    assert out[x == 0].tolist() == [1.0] * int((x == 0).sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_silu_times_up(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = (8 * torch.randn(40, 96, generator=generator)).to(dtype)
    gate_up[0, :6] = torch.tensor([0.0, -0.0, 100.0, -100.0, 1e4, -1e4])
    gate_up[1, 0] = torch.nan
    out = torch.empty(40, 1, 48, dtype=dtype)
    kernels.silu_multiply(as_array(gate_up), len(out), as_array(out))
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(
        out.squeeze(1).double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-30, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("width", [16, 64, 100, 576, 5])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    """As torch's own, for the rows asked for; the others are left alone."""
    torch.manual_seed(width)
    x, weight = (torch.randn(7, width) * 3).to(dtype), torch.randn(width).to(dtype)
    out = torch.full((7, 1, width), 5.0, dtype=dtype)
    kernels.rms_norm(as_array(x), as_array(weight), np.float32(1e-5), 6, as_array(out))
    expected = torch.nn.functional.rms_norm(x[:6].float(), (width,), weight.float(), 1e-5)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out[:6, 0].float(), expected, atol=tolerance, rtol=tolerance)
    assert bool((out[6] == 5).all())
