"""Decoder layers and products that run as one kernel on a CPU with wide vectors, or with matrix tiles for bfloat16."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle2.models import stack_kernel
from eagle2.models.attention import Array, KVPool, RowLayout, as_array
from eagle2.models.kernel_threads import kernel_lock, kernel_threads
from eagle2.models.layers import LayerShape, Weights
from eagle2.models.products import COLUMNS, STEP, TILE_ROWS, has_matrix_tiles, packed
from eagle2.models.turns import WIDTH

# Row counts that cost the same as the next lower one and a row more: what a step is padded to.
ROW_TILES = tuple(range(TILE_ROWS, 513, TILE_ROWS))


@cache
def can_stack(dtype: torch.dtype) -> bool:
    """Whether this CPU has the instructions that the kernels are written for."""
    if dtype == torch.bfloat16:
        return has_matrix_tiles()
    return dtype == torch.float32 and bool(llvm.get_host_cpu_features().get("avx512f"))


class BlockLinear:
    """y = x W^T + b, the weight in blocks of 32 outputs; a row's bits do not depend on the other rows.

    weight (O, I), I a multiple of 32; x (T, I) -> (T, O) in ``out_dtype``, which is the weight's or float32.
    """

    tiles: tuple[int, ...] | None = None  # any number of rows will do

    def __init__(self, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> None:
        self._outputs, self._inputs = weight.shape
        self._dtype, self._out_dtype = weight.dtype, out_dtype or weight.dtype
        self._weights = as_array(aligned(packed(weight)))
        biases = torch.zeros(-(-self._outputs // COLUMNS) * COLUMNS)
        if bias is not None:
            biases[: self._outputs] = bias
        self._biases = biases.numpy()

    @property
    def num_outputs(self) -> int:
        return self._outputs

    @property
    def arrays(self) -> tuple[Array, Array]:
        """Packed weights and biases, as the kernels take them."""
        return self._weights, self._biases

    @staticmethod
    def fits(weight: Tensor) -> bool:
        return weight.device.type == "cpu" and weight.shape[1] % STEP == 0 and can_stack(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x = F.pad(x, (0, 0, 0, whole_tiles(rows) - rows)).contiguous()
        out = torch.empty(rows, self._outputs, dtype=self._out_dtype)
        counters = np.zeros((1, WIDTH), np.int64)
        with kernel_lock:
            threads = kernel_threads(self._outputs * self._inputs)
            stack_kernel.multiply(threads, as_array(x), rows, self._weights, self._biases, as_array(out), counters)
        return out

    def best(self, x: Tensor, outputs: int) -> Tensor:
        """x (T, I) -> (T,) int64: the lowest of the first ``outputs`` columns whose float32 sum is the row's largest,
        -1 where that is no finite number. No matrix of the sums is written."""
        rows, blocks = x.shape[0], -(-outputs // COLUMNS)
        x = F.pad(x, (0, 0, 0, whole_tiles(rows) - rows)).contiguous()
        tops, places = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.int32)
        counters = np.zeros((1, WIDTH), np.int64)
        with kernel_lock:
            threads = kernel_threads(self._outputs * self._inputs)
            stack_kernel.multiply_best(
                threads, as_array(x), rows, self._weights, self._biases, outputs, tops, places, counters
            )
        every = np.arange(rows)
        block = tops.argmax(axis=1)  # the first of equal ones; NaN counts as the largest
        best = np.where(np.isfinite(tops[every, block]), places[every, block], -1)
        return torch.from_numpy(best.astype(np.int64))


class LayerStack:
    """L decoder layers of the Llama family with one packed buffer of weights.

    Optional biases, head norms and input norms are taken where the weights have them, all layers alike.
    """

    tiles = ROW_TILES

    def __init__(self, weights: Weights, prefixes: list[str], shape: LayerShape, final_norm: Tensor | None) -> None:
        self._heads, self._dim = shape.num_heads, shape.head_dim
        self._eps = np.float32(shape.rms_norm_eps)
        self._layers = len(prefixes)
        first = prefixes[0]
        self._inner, self._width = weights[f"{first}mlp.gate_proj.weight"].shape
        self._has_input_norm = f"{first}input_layernorm.weight" in weights
        self._has_final_norm = final_norm is not None
        ones = torch.ones(self._width, dtype=weights[f"{first}mlp.gate_proj.weight"].dtype)
        self._dtype = ones.dtype
        matrices, biases, norms, head_norms = [], [], [], []
        for prefix in prefixes:
            for names in _FUSED:
                weight = torch.cat([weights[f"{prefix}{name}.weight"] for name in names])
                bias = torch.cat([_bias(weights, f"{prefix}{name}") for name in names])
                if names is _GATE_UP:
                    weight, bias = _in_turns(weight), _in_turns(bias)
                matrices.append(packed(weight))
                biases.append(bias)
            own = weights.get(f"{prefix}input_layernorm.weight", ones)
            norms.append(torch.stack([own, weights[f"{prefix}post_attention_layernorm.weight"]]))
            if f"{prefix}self_attn.q_norm.weight" in weights:
                names = tuple(f"{prefix}self_attn.{name}.weight" for name in ("q_norm", "k_norm"))
                head_norms.append(torch.stack([weights[name] for name in names]))
        norms.append(torch.stack([ones if final_norm is None else final_norm, ones]))
        self._weights = as_array(aligned(torch.cat(matrices)))
        self._biases = torch.cat(biases).numpy()
        self._norms = as_array(torch.stack(norms))
        heads = torch.stack(head_norms) if head_norms else torch.empty(0, 2, self._dim, dtype=self._dtype)
        self._head_norms = as_array(heads)

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array, np.float32, bool]:
        """Packed weights, biases, norms, head norms, epsilon and whether input norms are there, as in ``run_stack``."""
        return self._weights, self._biases, self._norms, self._head_norms, self._eps, self._has_input_norm

    @staticmethod
    def fits(weights: Weights, prefix: str, shape: LayerShape) -> bool:
        """Whether the layers' sizes suit the blocks, and this CPU the kernels."""
        weight = weights[f"{prefix}mlp.gate_proj.weight"]
        inner, width = weight.shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        whole = all(size % STEP == 0 for size in (inner, width, queries, queries + 2 * keys))
        return whole and weight.device.type == "cpu" and can_stack(weight.dtype)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, layout: RowLayout, pool: KVPool) -> Tensor:
        """x (T', H), T' whole tiles, is overwritten by the last hidden states. Writes the rows' keys and values.

        Returns the last states of the T rows, behind the final norm where there is one, (T, H).
        """
        rows, padded = len(layout.rows), x.shape[0]
        assert padded % TILE_ROWS == 0
        queries = self._heads * self._dim
        qkv_width = queries + 2 * pool.keys.shape[2] * self._dim
        normed, inner = torch.empty_like(x), torch.empty(padded, self._inner, dtype=x.dtype)
        qkv, attended = torch.empty(padded, qkv_width, dtype=x.dtype), torch.zeros(padded, queries, dtype=x.dtype)
        features = torch.empty(rows if self._has_final_norm else 0, self._width, dtype=x.dtype)
        counters = np.zeros((self._layers * stack_kernel.PHASES + 1, WIDTH), np.int64)
        with kernel_lock:
            threads = kernel_threads(self._weights.size)
            stack_kernel.run_stack(
                threads, as_array(x), as_array(normed), as_array(qkv),
                np.empty((padded, self._heads, self._dim), np.float32),
                as_array(attended).reshape(padded, self._heads, self._dim), as_array(inner), as_array(features),
                self._weights, self._biases, self._norms, self._head_norms, self._eps, self._has_input_norm,
                cos.numpy(), sin.numpy(), layout.slots[:rows], as_array(pool.keys), as_array(pool.values),
                layout.tables, layout.lengths, layout.paths, layout.path_lengths, layout.tasks,
                np.float32(self._dim**-0.5), counters,
            )  # fmt: skip
        return features if self._has_final_norm else x[:rows]


_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FUSED: tuple[tuple[str, ...], ...] = (_QKV, ("self_attn.o_proj",), _GATE_UP, ("mlp.down_proj",))


def whole_tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS) * TILE_ROWS


def aligned(values: Tensor) -> Tensor:
    """The same numbers in memory of their own that begins at a cache line (torch's allocator sees to it)."""
    return values.contiguous().clone()


def _bias(weights: Weights, name: str) -> Tensor:
    bias = weights.get(f"{name}.bias")
    return torch.zeros(weights[f"{name}.weight"].shape[0]) if bias is None else bias.float()


def _in_turns(rows: Tensor) -> Tensor:
    """First and second half of the rows in turns of 16: a block then holds a gate's columns and those of its up."""
    halves = rows.view(2, rows.shape[0] // 32, 16, *rows.shape[1:])
    return halves.transpose(0, 1).flatten(0, 2)
