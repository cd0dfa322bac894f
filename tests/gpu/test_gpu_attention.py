"""The compiled attention kernels against softmax in float64, at the shapes of real models."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.models.rows import Rows

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
CASES = [
    *(((32, 8, 128), dtype) for dtype in TOLERANCE),
    *(((9, 3, 64), dtype) for dtype in (torch.float32, torch.bfloat16)),
    ((8, 8, 96), torch.bfloat16),
    ((4, 2, 16), torch.float32),
]


class Batch:
    """A prompt of 300 tokens, trees of 60 nodes behind 0 to 1,300 positions, and single tokens."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.heads, self.shape, self.dtype, self.device = heads, (kv_heads, dim), dtype, device
        generator = torch.Generator().manual_seed(0)
        slots = iter(np.random.default_rng(0).permutation(4096).astype(np.int32))

        def take(count: int) -> np.ndarray:
            return np.array([next(slots) for _ in range(count)], np.int32)

        builder = RowsBuilder()
        builder.add_span(take(300), 0, [0] * 300)
        for context, nodes in ((1300, 60), (0, 60), (256, 1), (513, 1), (64, 7)):
            own, paths = take(nodes), np.full((nodes, 7), -1, np.int32)
            depths = np.minimum(np.arange(nodes), 6) % 7
            for node in range(nodes):
                above = [own[level] for level in range(depths[node])]
                paths[node, : depths[node] + 1] = [*above, own[node]]
            builder.add_nodes(take(context), [0] * nodes, depths, paths)
        self.host = builder.build()
        count = len(self.host)
        self.keys = torch.randn(4096, kv_heads, dim, generator=generator).to(dtype)
        self.values = torch.randn(4096, kv_heads, dim, generator=generator).to(dtype)
        self.qkv = torch.randn(count, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
        angles = torch.randn(count, dim // 2, generator=generator)
        self.cos, self.sin = angles.cos(), angles.sin()

    def attend(self, *, split: bool, rows: Rows | None = None, keep: slice = slice(None)) -> Tensor:
        from eagle2.models.gpu_attention import GpuRowLayout

        layout = GpuRowLayout((rows or self.host).to(self.device), split=split)
        parts = (part[keep].to(self.device) for part in (self.qkv, self.cos, self.sin))
        keys, values = self.keys.to(self.device), self.values.to(self.device)
        return layout.attend(*parts, keys, values, self.heads).cpu()

    def expected(self) -> Tensor:
        (kv_heads, dim), rows = self.shape, self.host
        q, k, v = self.qkv.view(len(rows), -1, dim).split([self.heads, kv_heads, kv_heads], dim=1)

        def rotated(x: Tensor) -> Tensor:
            low, high = x.float().chunk(2, dim=-1)
            c, s = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
            return torch.cat([low * c - high * s, high * c + low * s], dim=-1).to(self.dtype)

        keys, values = self.keys.clone(), self.values.clone()
        keys[rows.slots.long()], values[rows.slots.long()] = rotated(k), v
        queries, out = rotated(q).double(), []
        for sequence, (begin, end) in enumerate(pairwise(rows.starts.tolist())):
            for row in range(begin, end):
                table = rows.tables[sequence, : int(rows.lengths[row])]
                seen = torch.cat([table, rows.paths[row, : int(rows.path_lengths[row])]]).long()
                scores = torch.einsum("hgd,lhd->hgl", queries[row].view(kv_heads, -1, dim), keys[seen].double())
                weights = (scores / math.sqrt(dim)).softmax(-1)
                out.append(torch.einsum("hgl,lhd->hgd", weights, values[seen].double()).flatten())
        return torch.stack(out)


@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
def test_prompts_and_trees_against_softmax(gpu: torch.device, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    batch = Batch(*heads, dtype, gpu)
    expected = batch.expected()
    whole, split = batch.attend(split=False), batch.attend(split=True)
    for out in (whole, split):
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(whole, split), "parts that are merged elsewhere have other bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone(gpu: torch.device, dtype: torch.dtype) -> None:
    batch = Batch(32, 8, 128, dtype, gpu)
    together = batch.attend(split=False)
    begin, end = batch.host.starts[1:3].tolist()
    rows = batch.host
    alone = Rows(
        *(part[begin:end] for part in (rows.tokens, rows.positions, rows.slots)),
        torch.tensor([0, end - begin], dtype=torch.int32),
        rows.tables[1:2],
        *(part[begin:end] for part in (rows.lengths, rows.paths, rows.path_lengths)),
    )
    assert torch.equal(batch.attend(split=True, rows=alone, keep=slice(begin, end)), together[begin:end])
