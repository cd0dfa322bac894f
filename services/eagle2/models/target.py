"""The target model: a Llama-family decoder with its own lean forward over a slot pool."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle2.models.architecture import TargetConfig
from eagle2.models.attention import KVPool, RowLayout
from eagle2.models.fused import best_outputs, fused_layers, row_linear, stack_tiles
from eagle2.models.layers import DecoderLayer, RMSNorm, RotaryTable, Weights, common_tiles, padded_rows
from eagle2.models.rows import Rows


class TargetModel:
    """Weights and forward; the KV cache is the caller's.

    weights: tensors by Hugging Face name. ``max_positions`` bounds the rotary table (tokens).
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        weights = {name: tensor.to(device=self.device, dtype=dtype) for name, tensor in weights.items()}
        self.embedding = weights["model.embed_tokens.weight"]
        self.head_weight = self.embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        prefixes = [f"model.layers.{i}." for i in range(config.num_layers)]
        self._layers: list[DecoderLayer] = []
        self._stack = fused_layers(weights, prefixes, config, weights["model.norm.weight"])
        if self._stack is None:
            self._layers = [DecoderLayer(weights, prefix, config) for prefix in prefixes]
        self._norm = RMSNorm(weights["model.norm.weight"], config.rms_norm_eps)
        self._head = row_linear(self.head_weight, out_dtype=torch.float32)
        self._rotary = RotaryTable(
            config.rope, config.head_dim, max_positions or config.max_position_embeddings, self.device
        )
        self._tiles = stack_tiles(self._stack) or common_tiles(
            tuple(linear for layer in self._layers for linear in layer.linears)
        )

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """The row counts that a forward is padded to, ascending; none where it is not padded."""
        return self._tiles or ()

    def new_pool(self, slots: int) -> KVPool:
        config = self.config
        return KVPool(config.num_layers, slots, config.num_kv_heads, config.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, rows: Rows, pool: KVPool) -> Tensor:
        """Features of all rows: the last hidden state after the final norm, (T, H). Writes keys and values."""
        padded = padded_rows(len(rows), self._tiles)
        layout = RowLayout(rows, padded, torch.get_num_threads())
        extra = (0, padded - len(rows))
        cos, sin = self._rotary.at(F.pad(rows.positions, extra))
        x = self.embedding[F.pad(rows.tokens, extra)]
        if self._stack is not None:
            return self._stack(x, cos, sin, layout, pool)
        for index, layer in enumerate(self._layers):
            x = layer(x, cos, sin, layout, pool, index)
        return self._norm(x[: len(rows)].contiguous())

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """(T, H) -> (T, V) float32."""
        return self._head(features)

    @torch.inference_mode()
    def best(self, features: Tensor, vocab_size: int) -> Tensor:
        """(T, H) -> (T,) int64 on the host: each row's arg-max among the first ``vocab_size`` ids, -1 where it is no
        finite number; what the logits would say."""
        return best_outputs(self._head, features, vocab_size)
