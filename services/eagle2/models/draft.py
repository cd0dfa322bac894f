"""The EAGLE-1/2 draft head: one decoder layer over fused (token embedding, feature) pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle2.models.architecture import DraftConfig
from eagle2.models.attention import KVPool, RowLayout
from eagle2.models.fused import fused_layers, row_linear, stack_tiles
from eagle2.models.layers import DecoderLayer, RotaryTable, Weights, common_tiles, padded_rows
from eagle2.models.rows import Rows

if TYPE_CHECKING:
    from eagle2.models.grower import TreeGrower


class DraftModel:
    """Weights and forward of the head (EAGLE, arXiv 2401.15077, section 4.1); the KV cache is the caller's.

    The embedding and the lm_head are the target's: ``embedding`` (V, H) and ``head_weight`` (V, H). ``token_ids``
    (W,) int64, each once, are those that the lm_head is kept for; None: all of them, and W is V.
    """

    def __init__(
        self,
        config: DraftConfig,
        weights: Weights,
        embedding: Tensor,
        head_weight: Tensor,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        weights = {name: tensor.to(device=self.device, dtype=dtype) for name, tensor in weights.items()}
        self._embedding = embedding.to(device=self.device, dtype=dtype)
        self._fuse = row_linear(weights["fc.weight"], weights.get("fc.bias"))
        self._stack = fused_layers(weights, ["layers.0."], config, None)
        self._layer = None if self._stack is not None else DecoderLayer(weights, "layers.0.", config)
        self.token_ids = None if token_ids is None else token_ids.to(self.device)
        if token_ids is not None:
            head_weight = head_weight[token_ids.to(head_weight.device)]
        self._head = row_linear(head_weight.to(device=self.device, dtype=dtype), out_dtype=torch.float32)
        self._rotary = RotaryTable(
            config.rope, config.head_dim, max_positions or config.max_position_embeddings, self.device
        )
        linears = () if self._layer is None else self._layer.linears
        self._tiles = stack_tiles(self._stack) or common_tiles((self._fuse, *linears))
        self.grower = self._new_grower()

    def _new_grower(self) -> TreeGrower | None:
        """The whole draft as one kernel; None where this device or these sizes do not suit it."""
        if self._stack is None:
            return None
        from eagle2.models.grower import TreeGrower  # Numba may be absent where a GPU does the work
        from eagle2.models.stack import BlockLinear

        fuse, head = self._fuse, self._head
        if not (isinstance(fuse, BlockLinear) and isinstance(head, BlockLinear)):
            return None
        return TreeGrower(self._embedding, fuse, self._stack, head, self._rotary, self.token_ids, self.config)

    def new_pool(self, slots: int) -> KVPool:
        config = self.config
        return KVPool(1, slots, config.num_kv_heads, config.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, rows: Rows, features: Tensor, pool: KVPool) -> Tensor:
        """Predicted next features (T, H), un-normed. features (T, H): of each row's position; tokens: the next ones."""
        padded = padded_rows(len(rows), self._tiles)
        layout = RowLayout(rows, padded, torch.get_num_threads())
        extra = padded - len(rows)
        cos, sin = self._rotary.at(F.pad(rows.positions, (0, extra)))
        embedded = self._embedding[F.pad(rows.tokens, (0, extra))]
        # A 1-row linear may sum in another order, hence the padding before the first one already.
        x = self._fuse(torch.cat([embedded, F.pad(features, (0, 0, 0, extra))], dim=-1))
        if self._stack is not None:
            return self._stack(x, cos, sin, layout, pool)
        assert self._layer is not None
        return self._layer(x, cos, sin, layout, pool, 0)[: len(rows)]

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """(T, H) -> (T, W) float32, one column for each token that is scored."""
        return self._head(features)

    def ids_of(self, columns: Tensor) -> Tensor:
        """The token ids that columns of the logits stand for; any shape, int64."""
        return columns if self.token_ids is None else self.token_ids[columns]
