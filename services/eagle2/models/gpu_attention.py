# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator,misc"
"""Tree attention over a slot pool as Triton kernels: no mask over the context, no gathered copy of it.

One program takes a tile of query rows of one sequence and one key/value head: all queries that share this head, of as
many rows as fit. It walks the context in blocks of absolute positions, keys and values being read through the slot
table, then each row's own path, slot by slot, so that siblings are never summed, not even with weight 0.

The context is cut into parts at fixed absolute positions. A part is always summed by itself and the parts are merged
in order, whether one program does all of them or each has a program of its own, and a tile has the same shape for one
row and for a thousand. So a row's sums do not depend on what is computed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle2.models.rows import Rows

BLOCK_M = 64  # queries of a tile: rows times the heads that share a key
BLOCK_N = 64  # context positions that are read at once
PART = 256  # context positions that are summed by themselves
_HEADS_AT_ONCE = 8
# Programs that walk parts of one tile's context side by side, at most.
_WALKERS = 16
# Below this many programs for each multiprocessor a tile's parts get programs of their own.
_PROGRAMS_PER_PROCESSOR = 2
_PARTIAL_BYTES = 256 << 20  # sums of parts, beyond which one program does all parts of a tile
_LOG2_E = 1.4426950408889634


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, slots, queries, keys, values,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Rotary embedding (half split, float32) of queries and keys; keys and values go to the row's slot, if it has one.

    qkv (T, HEADS + 2 KV_HEADS, D); cos, sin (T, D/2) float32; slots (T,) int32, negative for padding;
    queries (T, HEADS, D); keys, values (S, KV_HEADS, D).
    """
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    d = tl.arange(0, BLOCK_D // 2)
    inside = d < HALF
    there = (head < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head)[:, None] * D + d[None, :]
    low, high = tl.load(source, mask=there, other=0.0), tl.load(source + HALF, mask=there, other=0.0)
    c = tl.load(cos + row * HALF + d, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + d, mask=inside, other=0.0)[None, :]
    first, second = low.to(tl.float32), high.to(tl.float32)
    turned_low, turned_high = first * c - second * s, second * c + first * s

    is_query = there & (head < HEADS)[:, None]
    target = queries + (row * HEADS + head)[:, None] * D + d[None, :]
    tl.store(target, turned_low.to(queries.dtype.element_ty), mask=is_query)
    tl.store(target + HALF, turned_high.to(queries.dtype.element_ty), mask=is_query)

    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        is_key = there & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
        target = keys + (slot * KV_HEADS + head - HEADS)[:, None] * D + d[None, :]
        tl.store(target, turned_low.to(keys.dtype.element_ty), mask=is_key)
        tl.store(target + HALF, turned_high.to(keys.dtype.element_ty), mask=is_key)
        is_value = there & (head >= HEADS + KV_HEADS)[:, None]
        target = values + (slot * KV_HEADS + head - HEADS - KV_HEADS)[:, None] * D + d[None, :]
        tl.store(target, low, mask=is_value)
        tl.store(target + HALF, high, mask=is_value)


@triton.jit
def _merge(top, total, sums, part_top, part_total, part_sums):
    """Two softmax sums as one: their largest scores (M,), their weights (M,), their weighted values (M, D)."""
    highest = tl.maximum(top, part_top)
    old, new = tl.exp2(top - highest), tl.exp2(part_top - highest)
    return highest, total * old + part_total * new, sums * old[:, None] + part_sums * new[:, None]


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    # Finite, since the difference of two infinities is none.
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    return top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def _context_part(
    queries, keys, values, table, kv_head, lengths, begin, end, scale,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The softmax sum over positions begin..end-1 of ``table``; a row sees those before its length."""
    top, total, sums = _nothing(BLOCK_M, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    for block in range(begin, end, BLOCK_N):
        position = block + tl.arange(0, BLOCK_N)
        inside = position < end
        slot = tl.load(table + position, mask=inside, other=0).to(tl.int64)
        place = (slot * KV_HEADS + kv_head) * D
        key = tl.load(keys + place[None, :] + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)  # (D, N)
        # IEEE for float32: the matrix units would round it to ten bits.
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        scores = tl.where(position[None, :] < lengths[:, None], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        old = tl.exp2(top - highest)
        value = tl.load(values + place[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        total = total * old + tl.sum(weights, 1)
        sums = sums * old[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = highest
    return top, total, sums


@triton.jit
def _path_part(
    queries, keys, values, path, kv_head, path_lengths, scale,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The softmax sum over each row's own path; ``path`` (M,) points at its first slot."""
    top, total, sums = _nothing(BLOCK_M, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    wide = queries.to(tl.float32)
    for step in range(tl.max(path_lengths, 0)):
        on_path = step < path_lengths
        slot = tl.load(path + step, mask=on_path, other=0).to(tl.int64)
        place = ((slot * KV_HEADS + kv_head) * D)[:, None] + d[None, :]
        mask = on_path[:, None] & (d < D)[None, :]
        key = tl.load(keys + place, mask=mask, other=0.0).to(tl.float32)
        score = tl.where(on_path, tl.sum(wide * key, 1) * scale, float("-inf"))
        highest = tl.maximum(top, score)
        weight, old = tl.exp2(score - highest), tl.exp2(top - highest)
        value = tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
        total = total * old + weight
        sums = sums * old[:, None] + weight[:, None] * value
        top = highest
    return top, total, sums


# Numbers that differ from batch to batch: a kernel compiled for each would buy nothing.
@triton.jit(do_not_specialize=["table_stride", "path_stride", "num_parts"])
def _attend(
    queries, keys, values, tables, lengths, paths, path_lengths, starts, tile_sequences, tile_rows, out,
    part_sums, part_weights, scale, table_stride, path_stride, num_parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile, one key/value head. SPLIT: programs 0..W-2 of the third axis walk parts W-1 apart and the last one
    takes the paths; sums go to ``part_sums`` and ``part_weights``. Else one program does it all and writes ``out``."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequences + tile)
    first, behind = tl.load(tile_rows + tile), tl.load(starts + sequence + 1)
    if first < behind:
        i = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        row = (first + i // GROUP).to(tl.int64)
        live = (i < ROWS * GROUP) & (row < behind)
        query = row * HEADS + kv_head * GROUP + i % GROUP
        here = live[:, None] & (d < D)[None, :]
        q = tl.load(queries + query[:, None] * D + d[None, :], mask=here, other=0.0)
        length = tl.load(lengths + row, mask=live, other=0)
        longest = tl.max(length, 0)
        table = tables + sequence.to(tl.int64) * table_stride
        if SPLIT:
            walker, walkers = tl.program_id(2), tl.num_programs(2) - 1
            if walker == walkers:
                path_length = tl.load(path_lengths + row, mask=live, other=0)
                top, total, sums = _path_part(
                    q, keys, values, paths + row * path_stride, kv_head, path_length, scale,
                    KV_HEADS, D, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                place = query * (num_parts + 1) + num_parts
                tl.store(part_weights + place * 2, top, mask=live)
                tl.store(part_weights + place * 2 + 1, total, mask=live)
                tl.store(part_sums + place[:, None] * D + d[None, :], sums, mask=here)
            else:
                for part in range(walker, tl.cdiv(longest, PART), walkers):
                    end = tl.minimum(part * PART + PART, longest)
                    top, total, sums = _context_part(
                        q, keys, values, table, kv_head, length, part * PART, end, scale,
                        KV_HEADS, D, BLOCK_M, BLOCK_N, BLOCK_D,
                    )  # fmt: skip
                    place = query * (num_parts + 1) + part
                    tl.store(part_weights + place * 2, top, mask=live)
                    tl.store(part_weights + place * 2 + 1, total, mask=live)
                    tl.store(part_sums + place[:, None] * D + d[None, :], sums, mask=here)
        else:
            top, total, sums = _nothing(BLOCK_M, BLOCK_D)
            for begin in range(0, longest, PART):
                end = tl.minimum(begin + PART, longest)
                part_top, part_total, part = _context_part(
                    q, keys, values, table, kv_head, length, begin, end, scale,
                    KV_HEADS, D, BLOCK_M, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                top, total, sums = _merge(top, total, sums, part_top, part_total, part)
            path_length = tl.load(path_lengths + row, mask=live, other=0)
            part_top, part_total, part = _path_part(
                q, keys, values, paths + row * path_stride, kv_head, path_length, scale, KV_HEADS, D, BLOCK_M, BLOCK_D
            )
            top, total, sums = _merge(top, total, sums, part_top, part_total, part)
            # Padding inside a sequence sees nothing: zeros. NaN is not equal to zero and stays.
            result = tl.where(total[:, None] == 0.0, 0.0, sums / total[:, None])
            tl.store(out + query[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["num_sequences", "num_parts"])
def _merge_parts(
    part_sums, part_weights, lengths, starts, out, num_sequences, num_parts,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A row's parts in order, its path last, as ``_attend`` merges them."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(starts + num_sequences):
        head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
        there = head < HEADS
        d = tl.arange(0, BLOCK_D)
        here = there[:, None] & (d < D)[None, :]
        first = (row * HEADS + head) * (num_parts + 1)
        used = tl.cdiv(tl.load(lengths + row), PART)
        top, total, sums = _nothing(AT_ONCE, BLOCK_D)
        for step in range(used + 1):
            place = first + tl.where(step < used, step, num_parts)
            part_top = tl.load(part_weights + place * 2, mask=there, other=0.0)
            part_total = tl.load(part_weights + place * 2 + 1, mask=there, other=1.0)
            part = tl.load(part_sums + place[:, None] * D + d[None, :], mask=here, other=0.0)
            top, total, sums = _merge(top, total, sums, part_top, part_total, part)
        target = out + (row * HEADS + head)[:, None] * D + d[None, :]
        result = tl.where(total[:, None] == 0.0, 0.0, sums / total[:, None])
        tl.store(target, result.to(out.dtype.element_ty), mask=here)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a forward's rows are cut; made once for all layers.

    sequences, rows: (X,) int32, a tile's sequence and its first row; tiles beyond the last one begin behind their
    sequence's rows. sums (T, heads, parts + 1, D) and weights (T, heads, parts + 1, 2) float32 hold parts, or nothing.
    """

    sequences: Tensor
    rows: Tensor
    sums: Tensor
    weights: Tensor
    walkers: int  # 0: not split


class GpuRowLayout:
    """What attention needs of ``Rows`` once per forward. Rows behind the last sequence's are padding.

    Nothing is read back from the device, and what is launched depends on shapes alone: a captured forward holds for
    any lengths, paths and slots.
    """

    def __init__(self, rows: Rows, *, split: bool | None = None) -> None:
        """split: whether a tile's parts get programs of their own; None: where the device would stand idle else."""
        self._rows = rows
        self._split = split
        self._plan: _Plan | None = None

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
        """Write the rows' keys and values, then attend.

        qkv (T, (heads + 2 kv) D); cos, sin (T, D/2) float32; keys, values (S, kv, D) -> (T, heads * D). Padding rows
        write nothing and give zeros.
        """
        rows, (_, kv_heads, dim) = self._rows, keys.shape
        plan = self._plan = self._plan or self._make_plan(heads, kv_heads, dim)
        total, block = qkv.shape[0], max(16, triton.next_power_of_2(dim))
        qkv = qkv.contiguous()
        queries = torch.empty(total, heads, dim, dtype=qkv.dtype, device=qkv.device)
        out = torch.zeros(total, heads, dim, dtype=qkv.dtype, device=qkv.device)
        _rotate_and_store[(total, triton.cdiv(heads + 2 * kv_heads, _HEADS_AT_ONCE))](
            qkv, cos, sin, rows.slots, queries, keys, values,
            HEADS=heads, KV_HEADS=kv_heads, D=dim, BLOCK_D=block, AT_ONCE=_HEADS_AT_ONCE, num_warps=4,
        )  # fmt: skip
        parts = plan.sums.shape[2] - 1
        _attend[(len(plan.rows), kv_heads, plan.walkers + 1)](
            queries, keys, values, rows.tables, rows.lengths, rows.paths, rows.path_lengths, rows.starts,
            plan.sequences, plan.rows, out, plan.sums, plan.weights, _LOG2_E * dim**-0.5,
            rows.tables.stride(0), rows.paths.stride(0), parts,
            HEADS=heads, KV_HEADS=kv_heads, D=dim, BLOCK_D=block,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, PART=PART, SPLIT=plan.walkers > 0, **_launch(qkv.dtype),
        )  # fmt: skip
        if plan.walkers:
            _merge_parts[(total, triton.cdiv(heads, _HEADS_AT_ONCE))](
                plan.sums, plan.weights, rows.lengths, rows.starts, out, len(rows.starts) - 1, parts,
                HEADS=heads, D=dim, BLOCK_D=block, AT_ONCE=_HEADS_AT_ONCE, PART=PART, num_warps=4,
            )  # fmt: skip
        return out.view(total, heads * dim)

    def _make_plan(self, heads: int, kv_heads: int, dim: int) -> _Plan:
        rows, device = self._rows, self._rows.tokens.device
        group = heads // kv_heads
        assert group <= BLOCK_M, f"{group} heads that share a key do not fit a tile of {BLOCK_M}"
        total, sequences = len(rows), len(rows.starts) - 1
        at_once = BLOCK_M // group
        # Each sequence's last tile may be cut short; how many there are is known on the device only.
        tiles = total // at_once + min(sequences, total)
        ends = (-(-rows.starts.diff() // at_once)).cumsum(0)
        tile = torch.arange(tiles, device=device)
        sequence = torch.searchsorted(ends, tile, right=True).clamp_max(sequences - 1)
        before = torch.where(sequence > 0, ends[(sequence - 1).clamp_min(0)], 0)
        first = rows.starts[sequence] + (tile - before) * at_once

        parts = -(-rows.tables.shape[1] // PART)
        split = self._split
        if split is None:
            idle = tiles * kv_heads < _PROGRAMS_PER_PROCESSOR * _processors(device)
            split = idle and parts > 1 and 4 * total * heads * (parts + 1) * (dim + 2) <= _PARTIAL_BYTES
        kept = (total, heads, parts + 1) if split else (1, 1, 1)
        return _Plan(
            sequences=sequence.int(),
            rows=first.int(),
            sums=torch.empty(*kept, dim, dtype=torch.float32, device=device),
            weights=torch.empty(*kept, 2, dtype=torch.float32, device=device),
            walkers=min(parts, _WALKERS) if split else 0,
        )


def _launch(dtype: torch.dtype) -> dict[str, Any]:
    # Eight warps hold both sums of a tile in registers (heads of 128 numbers on Hopper). Float32 is there for checks:
    # its tiles take twice the shared memory.
    return {"num_warps": 8, "num_stages": 2 if dtype.itemsize == 2 else 1}


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
