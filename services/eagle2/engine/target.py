"""The verifier's device side: the target model, its slots and the features of every slot."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.kv_cache.slots import SlotPool, Slots, SlotTable
from eagle2.models.rows import Rows
from eagle2.models.target import TargetModel


class TargetRunner:
    """Runs batches and keeps each slot's feature, so that a drafter that has lost rows can be sent them again.

    ``vocab_size`` bounds the ids that may come out (a padded lm_head has more rows than the tokenizer has ids).
    """

    def __init__(self, model: TargetModel, num_slots: int, *, vocab_size: int | None = None) -> None:
        self.model = model
        self.pool = SlotPool(num_slots)
        self._kv = model.new_pool(num_slots)
        self._features = torch.empty(num_slots, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self._vocab_size = vocab_size or model.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.model.device

    def warm_up(self) -> None:
        """Run once, so that the first request does not wait for kernels to be compiled."""
        table = SlotTable(self.pool)
        builder = RowsBuilder()
        builder.add_span(table.extend(1), 0, [0])
        self.logits(self.forward(builder.build(self.device)))
        table.free()

    @torch.inference_mode()
    def forward(self, rows: Rows) -> Tensor:
        """Features (T, H) of all rows; also kept by slot."""
        features = self.model.forward(rows, self._kv)
        self._features[rows.slots.long()] = features
        return features

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """(T, H) -> (T, V) float32; ids beyond the vocabulary are -inf."""
        logits = self.model.logits(features)
        if self._vocab_size < logits.shape[1]:
            logits[:, self._vocab_size :] = -torch.inf
        return logits

    def features_of(self, slots: Slots) -> Tensor:
        """(R, H) on the CPU, in the model's dtype."""
        return self._features[torch.from_numpy(slots.astype("int64")).to(self.device)].cpu()
