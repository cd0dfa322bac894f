"""Draft trees on a CPU, all levels in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle2.models import draft_kernel
from eagle2.models.architecture import DraftConfig
from eagle2.models.attention import Array, KVPool, as_array, row_tasks
from eagle2.models.kernel_threads import kernel_lock, kernel_threads
from eagle2.models.layers import RotaryTable
from eagle2.models.rows import Rows
from eagle2.models.stack import BlockLinear, LayerStack, aligned, whole_tiles
from eagle2.models.turns import WIDTH
from eagle2.speculative.draft import TreeShape


@dataclass(frozen=True, slots=True)
class Grown:
    """What a draft brought. tokens (ids), parents (B, n) int64 and scores (B, n) float32 of the drafted nodes; for each
    of the A sequences whether the output at its last row was made of numbers."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    is_sound: list[bool]


class TreeGrower:
    """The head's forward of new rows and the trees that ``draft_trees`` grows from them, as one call.

    embedding (V, H); token_ids (W,) int64 or None: the ids of the columns that ``head`` scores.
    """

    def __init__(
        self,
        embedding: Tensor,
        fuse: BlockLinear,
        stack: LayerStack,
        head: BlockLinear,
        rotary: RotaryTable,
        token_ids: Tensor | None,
        config: DraftConfig,
    ) -> None:
        self._dtype, self._width = embedding.dtype, embedding.shape[1]
        self._heads, self._dim, self._inner = config.num_heads, config.head_dim, config.intermediate_size
        self._columns = head.num_outputs
        ids = torch.arange(self._columns) if token_ids is None else token_ids
        self._model = (as_array(embedding), *fuse.arrays, *stack.arrays, rotary.cos.numpy(), rotary.sin.numpy())
        self._head = (*head.arrays, ids.numpy())
        self._work = int(sum(array.size for array in (fuse.arrays[0], stack.arrays[0], head.arrays[0])))
        self._scratch: tuple[Array, ...] = ()
        self._scored: tuple[Array, ...] = ()

    def grow(
        self,
        rows: Rows,
        features: Tensor,
        pool: KVPool,
        ends: Sequence[int],
        drafting: Sequence[int],
        beams: Array,
        shape: TreeShape,
        columns: int,
    ) -> Grown:
        """Write the keys and values of the new rows, and draft.

        rows: spans of A sequences; features (T, H) of them. ends (A,): each one's last row. drafting (B,): which of the
        A get a tree. beams (B, (depth - 1) * K) int32: slots for the rows of beams. columns: how many of the head's
        columns may be drafted, from the first on; at least K.
        """
        count, total = len(drafting), len(rows)
        k = min(shape.top_k, self._columns)
        assert k <= columns <= self._columns
        depth = shape.depth if count and shape.num_nodes > 1 else 0
        size = k + (depth - 1) * k * k if depth else 0
        nodes = min(shape.num_nodes - 1, size)
        tokens, parents = np.empty((count, nodes), np.int64), np.empty((count, nodes), np.int64)
        scores, is_sound = np.empty((count, nodes), np.float32), np.empty(len(ends), np.bool_)
        level = count * k
        candidates = (
            np.empty((count, size), np.int64), np.empty((count, size), np.int64), np.empty((count, size), np.float32),
        )  # fmt: skip
        beam = np.empty((count, k), np.int64), np.empty((count, k), np.float32)
        best = np.empty((level, k), np.float32), np.empty((level, k), np.int64)
        starts = np.arange(0, level + 1, k) if count else np.zeros(1, np.int64)
        threads = torch.get_num_threads()
        tasks = row_tasks(starts, threads)
        if count:
            tasks[:, 0] = np.asarray(drafting, np.int32)[tasks[:, 0]]
        level_rows = (
            np.empty(level, np.int64), np.empty(level, np.int64), np.empty(level, np.int64),
            np.empty(level, np.int32), np.empty(level, np.int32), np.full((level, max(depth - 1, 1)), -1, np.int32),
            np.empty(level, np.int32), self._head[2],
        )  # fmt: skip
        first_rows = (
            rows.tokens.numpy(), rows.positions.numpy(), as_array(features), np.arange(total), rows.slots.numpy(),
            rows.tables.numpy(), rows.lengths.numpy(), rows.paths.numpy(), rows.path_lengths.numpy(),
            row_tasks(rows.starts.numpy(), threads),
        )  # fmt: skip
        asked = np.asarray(ends, np.int64), np.asarray(drafting, np.int64), beams
        phases = draft_kernel.FORWARD_PHASES + 1 + depth * draft_kernel.LEVEL_PHASES
        counters = np.zeros((phases, WIDTH), np.int64)
        pools = as_array(pool.keys), as_array(pool.values)
        with kernel_lock:
            self._reserve(max(total, level), level, pool.keys.shape[2])
            weights, biases, ids = self._head
            draft_kernel.draft(
                kernel_threads(self._work), self._model, pools, (weights, biases, ids, columns, *self._scored),
                self._scratch, first_rows, asked, (*candidates, *beam, *best, tasks), level_rows,
                (is_sound, tokens, parents, scores), depth, k, np.float32(self._dim**-0.5), counters,
            )  # fmt: skip
        return Grown(torch.from_numpy(tokens), torch.from_numpy(parents), torch.from_numpy(scores), is_sound.tolist())

    def _reserve(self, rows: int, scored: int, kv_heads: int) -> None:
        """Memory for steps of that many rows; it is kept, and only grows."""
        rows, scored = whole_tiles(rows), whole_tiles(max(scored, 1))
        if not self._scratch or len(self._scratch[0]) < rows:
            heads, dim, width = self._heads, self._dim, self._width

            def numbers(*sizes: int) -> Array:
                return as_array(aligned(torch.zeros(sizes, dtype=self._dtype)))

            self._scratch = (
                numbers(rows, width), numbers(rows, 2 * width), numbers(rows, width),
                numbers(rows, (heads + 2 * kv_heads) * dim), np.zeros((rows, heads, dim), np.float32),
                numbers(rows, heads, dim), numbers(rows, self._inner), np.empty((rows, dim // 2), np.float32),
                np.empty((rows, dim // 2), np.float32), numbers(0, width),
            )  # fmt: skip
        if not self._scored or len(self._scored[0]) < scored:
            logits = torch.empty(scored, self._columns)
            self._scored = logits.numpy(), as_array(torch.zeros(scored, self._width, dtype=self._dtype))
