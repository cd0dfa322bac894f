"""Tree attention over a slot pool: on a CPU by the exact kernels, on a GPU by Triton's, else by gathered slots."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from eagle2.models.rows import Rows

if TYPE_CHECKING:
    from eagle2.models.gpu_attention import GpuRowLayout

with suppress(ModuleNotFoundError):  # a machine whose models all run on its GPU does without Numba
    from eagle2.models import kernels
    from eagle2.models.kernel_threads import kernel_lock, kernel_threads

Array = NDArray[Any]

# Rows that share one copy of a context block; more tasks than that only where threads would stand idle.
_ROWS_PER_TASK = 16


class KVPool:
    """Keys and values of all slots, one pool a layer.

    keys, values: (layers, slots, kv_heads, head_dim) in the model's dtype.
    """

    def __init__(
        self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, slots, kv_heads, head_dim)
        # empty, not zeros: untouched pages of a large pool take no memory.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.key_arrays = [as_array(layer) for layer in self.keys] if device.type == "cpu" else []
        self.value_arrays = [as_array(layer) for layer in self.values] if device.type == "cpu" else []


def as_array(tensor: Tensor) -> Array:
    """A CPU tensor's memory as the kernels take it: bfloat16 as uint16 bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


class RowLayout:
    """What attention needs of ``Rows`` once per forward rather than once per layer."""

    def __init__(self, rows: Rows, padded: int, threads: int) -> None:
        """padded: rows of the hidden states, at least len(rows); the last ones are padding."""
        self.rows = rows
        self.on_cpu = rows.tokens.device.type == "cpu"
        self._gpu: GpuRowLayout | None = None
        if not self.on_cpu:
            self._gpu = _gpu_layout(rows)
            if self._gpu is None:
                self._visible = _visible_slots(rows)
            return
        self.slots = F.pad(rows.slots, (0, padded - len(rows)), value=-1).numpy()
        self.tables, self.lengths = rows.tables.numpy(), rows.lengths.numpy()
        self.paths, self.path_lengths = rows.paths.numpy(), rows.path_lengths.numpy()
        self.positions = int(self.lengths.sum() + self.path_lengths.sum())
        self.tasks = row_tasks(rows.starts.numpy(), threads)

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, pool: KVPool, layer: int, heads: int) -> Tensor:
        """Write the rows' keys and values, then attend. qkv (T', (heads + 2 kv) D) -> (T', heads * D)."""
        if not self.on_cpu:
            if self._gpu is not None:
                return self._gpu.attend(qkv, cos, sin, pool.keys[layer], pool.values[layer], heads)
            return self._attend_gathered(qkv, cos, sin, pool, layer, heads)
        dim = pool.keys.shape[3]
        query = np.zeros((qkv.shape[0], heads, dim), np.float32)
        out = torch.zeros(qkv.shape[0], heads, dim)
        keys, values = pool.key_arrays[layer], pool.value_arrays[layer]

        with kernel_lock:
            kernel_threads(self.positions * heads * dim * 2)
            kernels.rotate_and_store(as_array(qkv), cos.numpy(), sin.numpy(), self.slots, keys, values, query)
            kernels.attend(
                query, keys, values, self.tables, self.lengths, self.paths, self.path_lengths, self.tasks,
                np.float32(dim**-0.5), out.numpy(),
            )  # fmt: skip
        return out.view(qkv.shape[0], heads * dim).to(qkv.dtype)

    def _attend_gathered(self, qkv: Tensor, cos: Tensor, sin: Tensor, pool: KVPool, layer: int, heads: int) -> Tensor:
        rows, kv_heads, dim = len(self.rows), pool.keys.shape[2], pool.keys.shape[3]
        q, k, v = qkv[:rows].view(rows, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        q, k = rotated(q, cos[:rows], sin[:rows]), rotated(k, cos[:rows], sin[:rows])
        slots = self.rows.slots.long()
        pool.keys[layer, slots], pool.values[layer, slots] = k.to(qkv.dtype), v
        visible, mask = self._visible
        keys, values = (p[layer, visible].transpose(1, 2) for p in (pool.keys, pool.values))  # (T, kv, L, D)
        out = F.scaled_dot_product_attention(
            q.to(qkv.dtype).unsqueeze(2), keys, values, attn_mask=mask[:, None, None], enable_gqa=True
        )
        return F.pad(out.reshape(rows, heads * dim), (0, 0, 0, qkv.shape[0] - rows))


def _gpu_layout(rows: Rows) -> GpuRowLayout | None:
    """What Triton's kernels need of ``rows``; None where there are none for this device."""
    if rows.tokens.device.type != "cuda" or not _has_triton():
        return None
    from eagle2.models.gpu_attention import GpuRowLayout

    return GpuRowLayout(rows)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE. x (T, heads, D); cos, sin (T, D/2) float32; float32 out."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def row_tasks(starts: Array, threads: int) -> Array:
    """(X, 3) int32: sequence, first row, end row. Small batches are cut finer, so that all threads have work."""
    sequences = len(starts) - 1
    tasks = []
    for sequence in range(sequences):
        begin, end = int(starts[sequence]), int(starts[sequence + 1])
        size = _ROWS_PER_TASK if sequences >= threads else min(_ROWS_PER_TASK, max(1, -(-(end - begin) // threads)))
        tasks += [(sequence, row, min(row + size, end)) for row in range(begin, end, size)]
    return np.array(tasks, dtype=np.int32).reshape(-1, 3)


def _visible_slots(rows: Rows) -> tuple[Tensor, Tensor]:
    """Per row the slots that it sees, context then path: (T, L + P) int64, and which of them count."""
    sequence = torch.repeat_interleave(rows.starts.long().diff())
    tables = rows.tables[sequence].long()
    in_table = torch.arange(tables.shape[1], device=tables.device) < rows.lengths.unsqueeze(1)
    in_path = torch.arange(rows.paths.shape[1], device=tables.device) < rows.path_lengths.unsqueeze(1)
    mask = torch.cat([in_table, in_path], dim=1)
    slots = torch.cat([tables, rows.paths.long()], dim=1)
    return torch.where(mask, slots, rows.slots.long().unsqueeze(1)), mask
