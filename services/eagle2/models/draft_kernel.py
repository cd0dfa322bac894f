# mypy: disable-error-code="no-untyped-call,no-untyped-def,call-arg,unreachable"
"""A whole draft as one kernel: the head's new rows, then level by level the beam, its forward and its best children.

It grows the trees of ``speculative.draft.draft_trees``, with ties between tokens going to the lower column. Threads
take pieces in turn, phase after phase, as in ``stack_kernel``; a piece is a row, a block of columns or a sequence.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from eagle2.models import stack_kernel
from eagle2.models.kernels import _EXP_LOW, _exp, widen
from eagle2.models.products import COLUMNS
from eagle2.models.turns import put, take, wait

FORWARD_PHASES = stack_kernel.PHASES + 3  # one layer, and what is gathered and fused before it
LEVEL_PHASES = FORWARD_PHASES + 4
_ZERO, _NEG_INF = np.float32(0), np.float32(-np.inf)
_CONTRACT = {"contract"}  # fused multiply-add, but no reordering


@njit(cache=True)
def _insert(value, number, values, numbers, count):
    """Put a value into the first ``count`` of a descending list, behind equal ones; returns the new count.

    The list is full at ``len(values)``, and its last one falls off; what is no number goes to the end.
    """
    if count == values.shape[0]:
        if not value > values[count - 1]:
            return count
        count -= 1
    place = count
    while place > 0 and value > values[place - 1]:
        values[place], numbers[place] = values[place - 1], numbers[place - 1]
        place -= 1
    values[place], numbers[place] = value, number
    return count + 1


@njit(cache=True, fastmath=_CONTRACT)
def best_children(logits, columns, lanes, scores, children):
    """Log-probabilities and columns of a row's likeliest tokens, the best first, the lower column first of equals.

    logits (W,) float32, of which the first ``columns`` count; lanes (16,) float32 scratch; scores (K,) float32 and
    children (K,) int64 are filled, K at most ``columns``.
    """
    count = 0
    whole = columns // 16 * 16
    least = _NEG_INF
    for first in range(0, whole, 16):
        if count == scores.shape[0]:
            least = scores[count - 1]
            # One comparison for sixteen: hardly any of them gets into the list.
            above = 0
            for j in range(16):
                above += logits[first + j] > least
            if above == 0:
                continue
        for j in range(16):
            count = _insert(logits[first + j], first + j, scores, children, count)
    for column in range(whole, columns):
        count = _insert(logits[column], column, scores, children, count)
    top = scores[0]
    lanes[:] = _ZERO
    for first in range(0, whole, 16):
        for j in range(16):
            x = logits[first + j] - top
            lanes[j] += _exp(max(x, _EXP_LOW)) if x > _EXP_LOW else _ZERO
    for column in range(whole, columns):
        x = logits[column] - top
        lanes[column - whole] += _exp(max(x, _EXP_LOW)) if x > _EXP_LOW else _ZERO
    for half in (8, 4, 2, 1):
        for j in range(half):
            lanes[j] += lanes[j + half]
    total = top + np.float32(np.log(lanes[0]))
    for i in range(scores.shape[0]):
        scores[i] -= total


@njit(cache=True)
def _forward(
    model, pools, scratch, tokens, positions, given, sources, slots, tables, lengths, paths, path_lengths, tasks, scale,
    sums, counters,
):  # fmt: skip
    """One forward of the head: row r of the tokens and of ``given[sources[r]]``; its output stands in scratch x."""
    embedding, fuse, fuse_bias, weights, biases, norms, head_norms, eps, input_norm, all_cos, all_sin = model
    x, pairs, normed, qkv, query, attended, inner, cos, sin, nothing = scratch
    rows, width = slots.shape[0], x.shape[1]
    while True:
        row = take(counters, 0)
        if row >= rows:
            break
        pairs[row, :width] = embedding[tokens[row]]
        pairs[row, width:] = given[sources[row]]
        cos[row], sin[row] = all_cos[positions[row]], all_sin[positions[row]]
        put(counters, 0)
    wait(counters, 0, rows)
    blocks = width // COLUMNS
    while True:
        block = take(counters, 1)
        if block >= blocks:
            break
        stack_kernel._linear(pairs, rows, fuse, 0, fuse_bias, 0, 2 * width, block, x, sums)
        put(counters, 1)
    wait(counters, 1, blocks)
    stack_kernel._work(
        x, normed, qkv, query, attended, inner, nothing, weights, biases, norms, head_norms, eps, input_norm,
        cos, sin, slots, pools[0], pools[1], tables, lengths, paths, path_lengths, tasks, scale, counters[2:],
    )  # fmt: skip


@njit(cache=True)
def _grow_level(level, b, k, last, candidates, beam, best, rows, beams, length):
    """Add a level's candidates of sequence b and, unless it is the last one, make rows of its K best nodes."""
    tokens, parents, scores = candidates
    flat, path_scores = beam
    child_scores, children = best
    row_tokens, positions, sources, slots, lengths, paths, path_lengths, ids = rows
    if level == 0:
        for i in range(k):
            tokens[b, i], parents[b, i], scores[b, i] = children[b, i], -1, child_scores[b, i]
            flat[b, i], path_scores[b, i], sources[b * k + i] = i, child_scores[b, i], b
    else:
        begin = k + (level - 1) * k * k
        values, chosen, count = np.empty(k, np.float32), np.zeros(k, np.int64), 0
        for i in range(k * k):
            row, at = b * k + i // k, begin + i
            tokens[b, at], parents[b, at] = children[row, i % k], flat[b, i // k]
            scores[b, at] = path_scores[b, i // k] + child_scores[row, i % k]
            count = _insert(scores[b, at], i, values, chosen, count)
        before = paths[b * k : (b + 1) * k].copy()
        for i in range(k):
            flat[b, i], path_scores[b, i] = begin + chosen[i], values[i]
            sources[b * k + i] = b * k + chosen[i] // k
            paths[b * k + i] = before[chosen[i] // k]
    if last:
        return
    for i in range(k):
        row, own = b * k + i, beams[b, level * k + i]
        row_tokens[row] = ids[tokens[b, flat[b, i]]]
        positions[row], slots[row], lengths[row] = length + level, own, length
        paths[row, level] = own
        path_lengths[row] = level + 1


@njit(cache=True)
def _rerank(b, candidates, ids, out_tokens, out_parents, out_scores):
    """The n best candidates of sequence b, in flat order; of equal ones the lower flat index."""
    tokens, parents, scores = candidates
    n, total = out_tokens.shape[1], tokens.shape[1]
    values, chosen, count = np.empty(n, np.float32), np.zeros(n, np.int64), 0
    for i in range(total):
        count = _insert(scores[b, i], i, values, chosen, count)
    nodes = np.zeros(total, np.int64)
    nodes[chosen] = 1
    node = 0
    for i in range(total):
        if nodes[i] == 0:
            continue
        out_tokens[b, node] = ids[tokens[b, i]]
        out_parents[b, node] = 0 if parents[b, i] < 0 else nodes[parents[b, i]]
        out_scores[b, node] = scores[b, i]
        node += 1
        nodes[i] = node


@njit(error_model="numpy", cache=True)
def _draft_work(model, pools, head, scratch, rows, asked, levels, level_rows, out, depth, k, scale, counters):
    weights, biases, ids, columns, logits, scored = head
    tokens, positions, given, sources, slots, tables, lengths, paths, path_lengths, tasks = rows
    ends, drafting, beams = asked
    # Tuples of tuples cannot be handed to threads.
    candidates, beam, best, level_tasks = levels[:3], levels[3:5], levels[5:7], levels[7]
    is_sound, out_tokens, out_parents, out_scores = out
    x = scratch[0]
    width, sequences = x.shape[1], drafting.shape[0]
    saved, lanes = np.empty(64, np.uint8), np.empty(16, np.float32)
    sums = np.empty((stack_kernel._ROWS, COLUMNS), np.float32)
    blocks = -(-logits.shape[1] // COLUMNS)
    stack_kernel._begin(x, saved)
    _forward(
        model, pools, scratch, tokens, positions, given, sources, slots, tables, lengths, paths, path_lengths, tasks,
        scale, sums, counters,
    )  # fmt: skip
    phase = FORWARD_PHASES
    while True:
        piece = take(counters, phase)
        if piece >= ends.shape[0]:
            break
        is_sound[piece] = True
        for i in range(width):
            value = widen(x[ends[piece], i])
            is_sound[piece] &= value - value == 0
        put(counters, phase)
    wait(counters, phase, ends.shape[0])
    phase += 1
    for level in range(depth):
        count = sequences if level == 0 else sequences * k
        while True:
            row = take(counters, phase)
            if row >= count:
                break
            source = ends[drafting[row]] if level == 0 else row
            for i in range(width):
                scored[row, i] = x[source, i]
            put(counters, phase)
        wait(counters, phase, count)
        while True:
            block = take(counters, phase + 1)
            if block >= blocks:
                break
            stack_kernel._linear(scored, count, weights, 0, biases, 0, width, block, logits, sums)
            put(counters, phase + 1)
        wait(counters, phase + 1, blocks)
        while True:
            row = take(counters, phase + 2)
            if row >= count:
                break
            best_children(logits[row], columns, lanes, best[0][row], best[1][row])
            put(counters, phase + 2)
        wait(counters, phase + 2, count)
        last = level == depth - 1
        while True:
            b = take(counters, phase + 3)
            if b >= sequences:
                break
            length = lengths[ends[drafting[b]]]
            _grow_level(level, b, k, last, candidates, beam, best, level_rows, beams, length)
            if last:
                _rerank(b, candidates, ids, out_tokens, out_parents, out_scores)
            put(counters, phase + 3)
        if not last:
            wait(counters, phase + 3, sequences)
            _forward(
                model, pools, scratch, level_rows[0], level_rows[1], scored, level_rows[2], level_rows[3], tables,
                level_rows[4], level_rows[5], level_rows[6], level_tasks, scale, sums, counters[phase + 4 :],
            )  # fmt: skip
        phase += LEVEL_PHASES
    stack_kernel._end(x, saved)


@njit(parallel=True, nogil=True, cache=True)
def draft(threads, model, pools, head, scratch, rows, asked, levels, level_rows, out, depth, k, scale, counters):
    """Run the T new rows of A sequences and grow trees of ``depth`` levels for B of them; see ``grower``."""
    for _ in prange(threads):
        _draft_work(model, pools, head, scratch, rows, asked, levels, level_rows, out, depth, k, scale, counters)
