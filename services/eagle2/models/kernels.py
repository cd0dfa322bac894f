# mypy: disable-error-code="no-untyped-call,no-untyped-def,call-arg,unreachable"
"""CPU kernels whose result for a row depends on nothing but that row's own inputs, bit for bit.

Every query is folded over blocks of 64 *absolute positions*, one block after the other, with the same instructions
whether the keys of a block are committed context or a draft path, and whatever else is in the batch. So a token's
attention is the same in plain decoding, in a tree, in a prefill chunk, alone or in a batch.

Numba compiles them at first use (cached on disk) and no C compiler is needed. bfloat16 comes as its bits (uint16).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from eagle2.models.exponentials import EXP_LOW, LN2_HIGH, LN2_LOW, LOG2E, POLYNOMIAL, weigh
from eagle2.models.vectors import (
    add_rows_1,
    add_rows_2,
    add_rows_3,
    add_rows_4,
    copy_lanes,
    fetch_ahead,
    sum_rows_1,
    sum_rows_2,
    sum_rows_3,
    sum_rows_4,
    tile_columns,
    transpose_tile,
)

_CONTRACT = {"contract"}  # fused multiply-add, but no reordering: sums keep the order that is written here

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_NEG_INF = np.float32(-np.inf)
_EXP_LOW, _LOG2E = np.float32(EXP_LOW), np.float32(LOG2E)
_LN2_HIGH, _LN2_LOW = np.float32(LN2_HIGH), np.float32(LN2_LOW)
_P0, _P1, _P2, _P3, _P4, _P5 = map(np.float32, POLYNOMIAL)


def widen(value):
    """A stored number as float32: bfloat16 bits are the upper half of a float32's."""


@overload(widen, inline="always")
def _widen_overload(value):
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


def narrow(value, like):
    """A float32 in the format of the stored number ``like``, bfloat16 rounded to nearest even.

    A function of numbers: one that took the array would count references in the loop, and no vectors would come of it.
    """


@overload(narrow, inline="always")
def _narrow_overload(value, like):  # noqa: ARG001  (the arguments' names are the signature)
    if like == types.uint16:

        def to_bfloat16(value, like):  # noqa: ARG001  (the arguments' names are the signature)
            bits = np.float32(value).view(np.uint32)
            odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
            rounded = np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
            # A choice of values, not of branches, so that loops over it become vectors.
            return np.uint16(0x7FC0) if value != value else rounded

        return to_bfloat16

    return lambda value, like: value  # noqa: ARG005


# Lanes of a block of keys: 64 positions, and room behind them for a tile that begins at the last one.
BLOCK_LANES = 80


@njit(inline="always", fastmath=_CONTRACT)
def _exp(x: Any) -> Any:
    """exp of a float32 in [-87, 88]."""
    n = np.floor(x * _LOG2E + _HALF)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _P0
    p = p * r + _P1
    p = p * r + _P2
    p = p * r + _P3
    p = p * r + _P4
    p = p * r + _P5
    p = p * (r * r) + r + _ONE
    bits = np.uint32(np.int32(np.int32(n) + np.int32(127)) << np.int32(23))
    return p * np.uint32(bits).view(np.float32)


@njit(fastmath=_CONTRACT, cache=True)
def _fold_block(q, first, count, keys, values, valid, scale, s, keeps, o, place, m, totals):
    """Fold one block into the running softmax (online softmax) of up to 4 queries; m and totals are brought on.

    q (heads, D), queries first..first+count-1; keys (D, BLOCK_LANES) so that lanes are positions; values (64, D);
    s (4, 64) and keeps (4,) scratch; o (N, D) running outputs, m (N,) and totals (N,) running maxima and sums, those
    from ``place`` on. Positions from ``valid`` on weigh nothing. How many queries come together changes no bit.
    """
    dim = q.shape[1]
    if count == 1:
        sum_rows_1(q, first, keys, 0, dim, keeps, s, 0)
    elif count == 2:
        sum_rows_2(q, first, keys, 0, dim, keeps, s, 0)
    elif count == 3:
        sum_rows_3(q, first, keys, 0, dim, keeps, s, 0)
    else:
        sum_rows_4(q, first, keys, 0, dim, keeps, s, 0)
    for n in range(count):
        keeps[n] = weigh(s, n, valid, scale, m, totals, place + n)
    # Only valid positions are read: 0 times another token's NaN would be NaN.
    whole = dim // 64 * 64
    for column in range(0, whole, 64):
        if count == 1:
            add_rows_1(s, 0, values, column, valid, keeps, o, place)
        elif count == 2:
            add_rows_2(s, 0, values, column, valid, keeps, o, place)
        elif count == 3:
            add_rows_3(s, 0, values, column, valid, keeps, o, place)
        else:
            add_rows_4(s, 0, values, column, valid, keeps, o, place)
    if whole < dim:
        for n in range(count):
            for d in range(whole, dim):
                o[place + n, d] = o[place + n, d] * keeps[n]
            for j in range(valid):
                for d in range(whole, dim):
                    o[place + n, d] += s[n, j] * values[j, d]


@njit(cache=True)
def _load_block(key_pool, value_pool, slots, first, count, head, keys, values):
    """Copy positions first..first+count-1 into the block, transposed keys, and clear the other lanes of keys.

    Values behind ``count`` are left as they are: no position that does not count is ever read.
    """
    dim = keys.shape[0]
    last = first + count - 1
    columns = tile_columns(key_pool)
    whole = dim // columns * columns
    filled = min(64, (count + 15) // 16 * 16) if count > 0 else 0
    for lane in range(0, filled, 16):
        for column in range(0, whole, columns):
            # Behind the last position its key is repeated: such lanes are masked, but must be numbers.
            transpose_tile(key_pool, head, column, slots, first + lane, last, keys, lane)
        for d in range(whole, dim):
            for i in range(16):
                keys[d, lane + i] = widen(key_pool[slots[min(first + lane + i, last)], head, d])
    for d in range(dim):
        for j in range(filled, 64):
            keys[d, j] = _ZERO
    for j in range(count):
        _load_value(value_pool, slots[first + j], head, values, j)


@njit(cache=True)
def _load_value(value_pool, slot, head, values, j):
    dim = values.shape[1]
    whole = dim // 16 * 16
    for column in range(0, whole, 16):
        copy_lanes(value_pool, slot, head, column, values, j)
    for d in range(whole, dim):
        values[j, d] = widen(value_pool[slot, head, d])


@njit(cache=True)
def _load_path(key_pool, value_pool, path, length, first, end, head, keys, values):
    """Put the path's tokens at their true positions, those of [first, end), into the block beginning at ``first``."""
    dim = keys.shape[0]
    columns = tile_columns(key_pool)
    whole = dim // columns * columns
    begin, last = max(first, length) - length, end - length - 1
    for place in range(begin, last + 1, 16):
        for column in range(0, whole, columns):
            transpose_tile(key_pool, head, column, path, place, last, keys, place + length - first)
    for place in range(begin, last + 1):
        j = place + length - first
        for d in range(whole, dim):
            keys[d, j] = widen(key_pool[path[place], head, d])
        _load_value(value_pool, path[place], head, values, j)


# NumPy's division, which gives infinity or NaN: neither an error nor a check in the loop that keeps it from vectors.
@njit(error_model="numpy", fastmath=_CONTRACT, cache=True)
def attend_task(
    q, key_pool, value_pool, table, lengths, paths, path_lengths, begin, end, head, scale, keys, values, s, out
):
    """Attention of one sequence's rows begin..end-1 for one key head; arguments as in ``attend``.

    keys (D, BLOCK_LANES), values (64, D), s (4, 64) float32 are scratch; out may be bfloat16 as well.
    """
    dim = q.shape[2]
    group = q.shape[1] // key_pool.shape[1]
    queries = (end - begin) * group
    m = np.full(queries, _NEG_INF, np.float32)
    totals = np.zeros(queries, np.float32)
    o = np.zeros((queries, dim), np.float32)
    keeps = np.zeros(4, np.float32)
    longest = 0
    for row in range(begin, end):
        longest = max(longest, lengths[row])

    # Committed context. A block that a row's own path continues is left to the second loop.
    for first in range(0, longest, 64):
        ahead = max(0, min(64, longest - first - 64))
        fetch_ahead(value_pool, head, table, first, min(64, longest - first))
        fetch_ahead(key_pool, head, table, first + 64, ahead)
        _load_block(key_pool, value_pool, table, first, min(64, longest - first), head, keys, values)
        for row in range(begin, end):
            valid = min(64, lengths[row] - first)
            if valid <= 0 or (valid < 64 and path_lengths[row] > 0):
                continue
            for g in range(0, group, 4):
                _fold_block(
                    q[row], head * group + g, min(4, group - g), keys, values, valid, scale, s, keeps, o,
                    (row - begin) * group + g, m, totals,
                )  # fmt: skip

    loaded = -1
    for row in range(begin, end):
        if path_lengths[row] == 0:
            continue
        length = lengths[row]
        last = length + path_lengths[row]
        for first in range(length // 64 * 64, last, 64):
            if first <= length and loaded != length:
                _load_block(key_pool, value_pool, table, first, length - first, head, keys, values)
                loaded = length
            if first > length:
                loaded = -1
            valid = min(64, last - first)
            _load_path(key_pool, value_pool, paths[row], length, first, first + valid, head, keys, values)
            for g in range(0, group, 4):
                _fold_block(
                    q[row], head * group + g, min(4, group - g), keys, values, valid, scale, s, keeps, o,
                    (row - begin) * group + g, m, totals,
                )  # fmt: skip

    for row in range(begin, end):
        for g in range(group):
            i = (row - begin) * group + g
            inverse = _ONE / totals[i]
            for d in range(dim):
                out[row, head * group + g, d] = narrow(o[i, d] * inverse, out[row, head * group + g, d])


@njit(parallel=True, fastmath=_CONTRACT, cache=True)
def attend(q, key_pool, value_pool, tables, lengths, paths, path_lengths, tasks, scale, out):
    """Attention of T rows over their context and path (see ``Rows``).

    q, out (T, heads, D) float32; pools (S, kv_heads, D) uint16 or float32; tables (B, L), lengths (T,),
    paths (T, P), path_lengths (T,) int32; tasks (X, 3) int32: sequence, first row, end row. Rows of one sequence
    that have a path have equal lengths.
    """
    kv_heads = key_pool.shape[1]
    dim = q.shape[2]
    for work in prange(tasks.shape[0] * kv_heads):
        task = work // kv_heads
        keys = np.empty((dim, BLOCK_LANES), np.float32)
        values = np.empty((64, dim), np.float32)
        s = np.empty((4, 64), np.float32)
        attend_task(
            q, key_pool, value_pool, tables[tasks[task, 0]], lengths, paths, path_lengths, tasks[task, 1],
            tasks[task, 2], work % kv_heads, scale, keys, values, s, out,
        )  # fmt: skip


@njit(cache=True)
def rotate_and_store(qkv, cos, sin, slots, key_pool, value_pool, q):
    """Split fused projections, rotate queries and keys (half-split RoPE), write keys and values to their slots.

    qkv (T, (heads + 2 * kv_heads) * D) uint16 or float32; cos, sin (T, D/2) float32; slots (T,) int32, -1 for a
    padding row; pools (S, kv_heads, D); q (T, heads, D) float32 out.
    """
    for row in range(slots.shape[0]):
        if slots[row] >= 0:
            rotate_row(qkv, cos[row], sin[row], row, slots[row], key_pool, value_pool, q)


@njit(cache=True)
def rotate_row(qkv, cos, sin, row, slot, key_pool, value_pool, q):
    """One row of ``rotate_and_store``; cos, sin (D/2,)."""
    heads = q.shape[1]
    kv_heads = key_pool.shape[1]
    dim = q.shape[2]
    half = dim // 2
    for head in range(heads):
        line, target = qkv[row, head * dim : (head + 1) * dim], q[row, head]
        for d in range(half):
            a, b = widen(line[d]), widen(line[half + d])
            target[d] = a * cos[d] - b * sin[d]
            target[half + d] = b * cos[d] + a * sin[d]
    for head in range(kv_heads):
        line, stored = qkv[row, (heads + head) * dim : (heads + head + 1) * dim], key_pool[slot, head]
        for d in range(half):
            a, b = widen(line[d]), widen(line[half + d])
            stored[d] = narrow(a * cos[d] - b * sin[d], stored[d])
            stored[half + d] = narrow(b * cos[d] + a * sin[d], stored[half + d])
    for head in range(kv_heads):
        first = (heads + kv_heads + head) * dim
        line, stored = qkv[row, first : first + dim], value_pool[slot, head]
        for d in range(dim):
            stored[d] = narrow(widen(line[d]), stored[d])


@njit(inline="always", error_model="numpy")
def gate(value, up):
    """silu(value) * up of float32 numbers."""
    x = -value if -value > _EXP_LOW else _EXP_LOW
    x = x if x < -_EXP_LOW else -_EXP_LOW
    return value / (_ONE + _exp(x)) * up


@njit(error_model="numpy", cache=True)
def silu_multiply(gate_up, rows, out):
    """silu(gate) * up for the first ``rows`` rows. gate_up (T, 2I), out (T, 1, I), both uint16 or both float32."""
    inner = out.shape[2]
    for row in range(rows):
        for i in range(inner):
            product = gate(widen(gate_up[row, i]), widen(gate_up[row, inner + i]))
            out[row, 0, i] = narrow(product, gate_up[row, i])


@njit(cache=True)
def rms_norm(x, weight, eps, rows, out):
    """x / rms(x) * weight for the first ``rows`` rows, sums in 16 fixed lanes.

    x (T, H), weight (H,), out (T, 1, H), all uint16 or all float32.
    """
    lanes = np.empty(16, np.float32)
    for row in range(rows):
        norm_row(x[row], weight, eps, lanes, out[row, 0])


@njit(error_model="numpy", fastmath=_CONTRACT, cache=True)
def norm_row(x, weight, eps, lanes, out):
    """One row of ``rms_norm``: x, weight, out (H,); lanes (16,) float32 scratch."""
    width = x.shape[0]
    whole = width // 16 * 16
    lanes[:] = _ZERO
    for i in range(0, whole, 16):
        for j in range(16):
            value = widen(x[i + j])
            lanes[j] += value * value
    for i in range(whole, width):
        value = widen(x[i])
        lanes[i - whole] += value * value
    for half in (8, 4, 2, 1):
        for j in range(half):
            lanes[j] += lanes[j + half]
    scale = _ONE / np.sqrt(lanes[0] / np.float32(width) + eps)
    for i in range(width):
        out[i] = narrow(widen(x[i]) * scale * widen(weight[i]), x[i])
