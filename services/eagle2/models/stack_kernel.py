# mypy: disable-error-code="no-untyped-call,no-untyped-def,call-arg,unreachable"
"""A whole stack of decoder layers as one kernel: no operator, no array and no Python between two products.

Threads take blocks of 32 output columns (or a row, or a head of attention) in turn, phase after phase. What a row
gets depends on that row alone, see ``products`` and ``kernels``.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from eagle2.models import products
from eagle2.models.exponentials import finish_gated
from eagle2.models.kernels import BLOCK_LANES, attend_task, narrow, norm_row, rotate_row
from eagle2.models.turns import put, take, wait

COLUMNS = products.COLUMNS
PHASES = 8  # of one layer
_ROWS = 32  # of sums that are kept at once


def _begin(x, saved):
    """Get this thread ready for products of such numbers."""


@overload(_begin)
def _begin_overload(x, saved):  # noqa: ARG001  (the arguments' names are the signature)
    if x.dtype == types.uint16:
        return lambda x, saved: products.begin_tiles(saved)  # noqa: ARG005
    return lambda x, saved: None  # noqa: ARG005


def _end(x, saved):
    """Undo ``_begin``."""


@overload(_end)
def _end_overload(x, saved):  # noqa: ARG001
    if x.dtype == types.uint16:
        return lambda x, saved: products.end_tiles(saved)  # noqa: ARG005
    return lambda x, saved: None  # noqa: ARG005


def _product(x, row, end, weights, offset, sums):
    """Sums of some rows from ``row`` on with one block of 32 columns; returns how many rows. sums (32, 32) float32."""


@overload(_product)
def _product_overload(x, row, end, weights, offset, sums):  # noqa: ARG001
    if x.dtype == types.uint16:

        def by_tiles(x, row, end, weights, offset, sums):
            if end - row > products.TILE_ROWS:
                products.tile_product_pair(x, row, weights, offset, sums)
                return min(end - row, 2 * products.TILE_ROWS)
            products.tile_product(x, row, weights, offset, sums)
            return end - row

        return by_tiles

    def by_rows(x, row, end, weights, offset, sums):
        left = end - row
        if left >= 12:
            products.row_product_12(x, row, weights, offset, sums)
            return 12
        if left >= 8:
            products.row_product_8(x, row, weights, offset, sums)
            return 8
        if left >= 4:
            products.row_product_4(x, row, weights, offset, sums)
            return 4
        if left >= 2:
            products.row_product_2(x, row, weights, offset, sums)
            return 2
        products.row_product_1(x, row, weights, offset, sums)
        return 1

    return by_rows


@njit(cache=True)
def _linear(x, rows, weights, offset, biases, bias, inputs, block, out, sums):
    """out[:, block] = x W^T + b"""
    width = out.shape[1]
    first = block * COLUMNS
    row = 0
    while row < rows:
        count = _product(x, row, rows, weights, offset + first * inputs, sums)
        for i in range(count):
            at = (row + i) * width + first
            if first + COLUMNS <= width:
                products.finish(sums, i, 0, biases, bias + first, out, at)
                products.finish(sums, i, 16, biases, bias + first + 16, out, at + 16)
            else:
                for c in range(width - first):
                    out[row + i, first + c] = narrow(sums[i, c] + biases[bias + first + c], out[row + i, first + c])
        row += count


@njit(cache=True)
def _linear_added(x, rows, weights, offset, biases, bias, inputs, block, out, sums):
    """out[:, block] += x W^T + b, rounded before and after it is added. Whole blocks only."""
    first = block * COLUMNS
    row = 0
    while row < rows:
        count = _product(x, row, rows, weights, offset + first * inputs, sums)
        for i in range(count):
            at = (row + i) * out.shape[1] + first
            products.finish_added(sums, i, 0, biases, bias + first, out, at)
            products.finish_added(sums, i, 16, biases, bias + first + 16, out, at + 16)
        row += count


@njit(error_model="numpy", cache=True)
def _linear_gated(x, rows, weights, offset, biases, bias, inputs, block, out, sums):
    """out[:, 16 columns] = silu(gate) * up; a block holds 16 columns of each."""
    first = block * COLUMNS
    row = 0
    while row < rows:
        count = _product(x, row, rows, weights, offset + first * inputs, sums)
        for i in range(count):
            finish_gated(sums, i, biases, bias + first, out, (row + i) * out.shape[1] + block * 16)
        row += count


@njit(error_model="numpy", cache=True)
def _work(
    x, normed, qkv, query, attended, inner, features, weights, biases, norms, head_norms, eps, input_norm,
    cos, sin, slots, key_pools, value_pools, tables, lengths, paths, path_lengths, tasks, scale, counters,
):  # fmt: skip
    rows, width = slots.shape[0], x.shape[1]
    layers, kv_heads = key_pools.shape[0], key_pools.shape[2]
    heads, dim, hidden = query.shape[1], query.shape[2], inner.shape[1]
    saved = np.empty(64, np.uint8)
    sums = np.empty((_ROWS, COLUMNS), np.float32)
    keys, values = np.empty((dim, BLOCK_LANES), np.float32), np.empty((64, dim), np.float32)
    s, lanes = np.empty((4, 64), np.float32), np.empty(16, np.float32)
    flat = attended.reshape(attended.shape[0], heads * dim)
    qkv_width = qkv.shape[1]
    qkv_blocks, width_blocks, inner_blocks = qkv_width // COLUMNS, width // COLUMNS, hidden // 16
    offset, bias = 0, 0
    _begin(x, saved)
    for layer in range(layers):
        phase = layer * PHASES
        key_pool, value_pool = key_pools[layer], value_pools[layer]
        if input_norm:
            while True:
                row = take(counters, phase)
                if row >= rows:
                    break
                norm_row(x[row], norms[layer, 0], eps, lanes, normed[row])
                put(counters, phase)
            wait(counters, phase, rows)
        while True:
            block = take(counters, phase + 1)
            if block >= qkv_blocks:
                break
            # Not ``source = normed if ... else x``: two names for the same type cost the compiler its vectors.
            if input_norm:
                _linear(normed, rows, weights, offset, biases, bias, width, block, qkv, sums)
            else:
                _linear(x, rows, weights, offset, biases, bias, width, block, qkv, sums)
            put(counters, phase + 1)
        wait(counters, phase + 1, qkv_blocks)
        offset += qkv_width * width
        bias += qkv_width
        while True:
            row = take(counters, phase + 2)
            if row >= rows:
                break
            if head_norms.shape[0] > 0:
                for head in range(heads + kv_heads):
                    part = qkv[row, head * dim : (head + 1) * dim]
                    norm_row(part, head_norms[layer, 0 if head < heads else 1], eps, lanes, part)
            rotate_row(qkv, cos[row], sin[row], row, slots[row], key_pool, value_pool, query)
            put(counters, phase + 2)
        wait(counters, phase + 2, rows)
        pieces = tasks.shape[0] * kv_heads
        while True:
            piece = take(counters, phase + 3)
            if piece >= pieces:
                break
            task = piece // kv_heads
            attend_task(
                query, key_pool, value_pool, tables[tasks[task, 0]], lengths, paths, path_lengths, tasks[task, 1],
                tasks[task, 2], piece % kv_heads, scale, keys, values, s, attended,
            )  # fmt: skip
            put(counters, phase + 3)
        wait(counters, phase + 3, pieces)
        while True:
            block = take(counters, phase + 4)
            if block >= width_blocks:
                break
            _linear_added(flat, rows, weights, offset, biases, bias, heads * dim, block, x, sums)
            put(counters, phase + 4)
        wait(counters, phase + 4, width_blocks)
        offset += heads * dim * width
        bias += width
        while True:
            row = take(counters, phase + 5)
            if row >= rows:
                break
            norm_row(x[row], norms[layer, 1], eps, lanes, normed[row])
            put(counters, phase + 5)
        wait(counters, phase + 5, rows)
        while True:
            block = take(counters, phase + 6)
            if block >= inner_blocks:
                break
            _linear_gated(normed, rows, weights, offset, biases, bias, width, block, inner, sums)
            put(counters, phase + 6)
        wait(counters, phase + 6, inner_blocks)
        offset += 2 * hidden * width
        bias += 2 * hidden
        while True:
            block = take(counters, phase + 7)
            if block >= width_blocks:
                break
            _linear_added(inner, rows, weights, offset, biases, bias, hidden, block, x, sums)
            put(counters, phase + 7)
        wait(counters, phase + 7, width_blocks)
        offset += hidden * width
        bias += width
    if features.shape[0] > 0:
        phase = layers * PHASES
        while True:
            row = take(counters, phase)
            if row >= rows:
                break
            norm_row(x[row], norms[layers, 0], eps, lanes, features[row])
            put(counters, phase)
        wait(counters, phase, rows)
    _end(x, saved)


@njit(parallel=True, nogil=True, cache=True)
def run_stack(
    threads, x, normed, qkv, query, attended, inner, features, weights, biases, norms, head_norms, eps, input_norm,
    cos, sin, slots, key_pools, value_pools, tables, lengths, paths, path_lengths, tasks, scale, counters,
):  # fmt: skip
    """Run T rows through L layers, in place.

    x (T', H), T' at least T and whole tiles: hidden states in and out. normed (T', H), qkv (T', Q), query
    (T', heads, D) float32, attended (T', heads, D), inner (T', I): scratch. features (T', H): out, the last states
    normed by ``norms[L, 0]``; nothing of it where it has no rows. weights, biases: those of all layers, packed one
    behind the other (qkv, output, gate and up in turns of 16, down). norms (L + 1, 2, H); head_norms (L, 2, D) or
    without layers; pools (L, S, kv_heads, D); cos, sin (T, D/2); counters (8 L + 1, 16) int64 of zeros; the rest as
    in ``kernels.attend``.
    """
    for _ in prange(threads):
        _work(
            x, normed, qkv, query, attended, inner, features, weights, biases, norms, head_norms, eps, input_norm,
            cos, sin, slots, key_pools, value_pools, tables, lengths, paths, path_lengths, tasks, scale, counters,
        )  # fmt: skip


@njit(cache=True)
def _multiply_work(x, rows, weights, biases, out, counters):
    saved = np.empty(64, np.uint8)
    sums = np.empty((_ROWS, COLUMNS), np.float32)
    blocks = -(-out.shape[1] // COLUMNS)
    _begin(x, saved)
    while True:
        block = take(counters, 0)
        if block >= blocks:
            break
        _linear(x, rows, weights, 0, biases, 0, x.shape[1], block, out, sums)
    _end(x, saved)


@njit(parallel=True, nogil=True, cache=True)
def multiply(threads, x, rows, weights, biases, out, counters):
    """out[:rows] = x W^T + b. x (T', I), whole tiles; out (T, O), float32 also where x is bfloat16."""
    for _ in prange(threads):
        _multiply_work(x, rows, weights, biases, out, counters)


@njit(cache=True)
def _best_work(x, rows, weights, biases, columns, tops, places, counters):
    saved = np.empty(64, np.uint8)
    sums = np.empty((_ROWS, COLUMNS), np.float32)
    blocks, inputs = tops.shape[1], x.shape[1]
    _begin(x, saved)
    while True:
        block = take(counters, 0)
        if block >= blocks:
            break
        first, row = block * COLUMNS, 0
        while row < rows:
            count = _product(x, row, rows, weights, first * inputs, sums)
            for i in range(count):
                at = (row + i) * blocks + block
                products.best_of_block(sums, i, biases, first, columns - first, tops, places, at, first)
            row += count
    _end(x, saved)


@njit(parallel=True, nogil=True, cache=True)
def multiply_best(threads, x, rows, weights, biases, columns, tops, places, counters):
    """Of each row of x W^T + b and each block of 32 columns: the largest, and where it stands.

    x (T', I), whole tiles; ``columns``: those behind it do not count; tops (T, blocks) float32, NaN where the block
    has one; places (T, blocks) int32.
    """
    for _ in prange(threads):
        _best_work(x, rows, weights, biases, columns, tops, places, counters)
