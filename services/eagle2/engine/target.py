"""The verifier's device side: the target model, its slots and the features of every slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.engine.graphs import ForwardGraphs, GraphLimits, on_device
from eagle2.kv_cache.slots import SlotPool, Slots, SlotTable
from eagle2.models.fused import best_columns
from eagle2.models.rows import Rows
from eagle2.models.target import TargetModel


class TargetRunner:
    """Runs batches and keeps each slot's feature, so that a drafter that has lost rows can be sent them again.

    ``vocab_size`` bounds the ids that may come out (a padded lm_head has more rows than the tokenizer has ids).
    ``graphs``: forwards up to these limits are recorded; for GPUs.
    """

    def __init__(
        self,
        model: TargetModel,
        num_slots: int,
        *,
        vocab_size: int | None = None,
        graphs: GraphLimits | None = None,
    ) -> None:
        self.model = model
        self.pool = SlotPool(num_slots)
        self._kv = model.new_pool(num_slots)
        # The last row takes what padding writes, whose slot is -1.
        self._features = torch.empty(num_slots + 1, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self._vocab_size = vocab_size or model.config.vocab_size
        self._graphs = None if graphs is None else ForwardGraphs(self._run, model.device, graphs)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def warm_up(self) -> None:
        """Run once, so that the first request does not wait for kernels to be compiled."""
        table = SlotTable(self.pool)
        builder = RowsBuilder()
        builder.add_span(table.extend(1), 0, [0])
        features = self.forward(builder.build())
        self.logits(features)
        self.best_of(features)
        table.free()
        if self._graphs is not None:
            self._graphs.record_all()

    @torch.inference_mode()
    def forward(self, rows: Rows) -> Tensor:
        """Features (T, H) of all rows, which are on the host or on the device; also kept by slot.

        They are overwritten by the next forward.
        """
        on_host = rows.tokens.device.type == "cpu"
        features = self._graphs.run(rows) if self._graphs is not None and on_host else None
        return self._run(rows.to(self.device)) if features is None else features

    def _run(self, rows: Rows, _: Tensor | None = None) -> Tensor:
        features = self.model.forward(rows, self._kv)
        self._features[rows.slots.long()] = features
        return features

    @torch.inference_mode()
    def logits(self, features: Tensor, wanted: Sequence[int] | None = None) -> Tensor:
        """(T, H) -> (T, V) float32; ids beyond the vocabulary are -inf. ``wanted``: of these rows only, ascending."""
        logits = self.model.logits(self._rows(features, wanted))
        if self._vocab_size < logits.shape[1]:
            logits[:, self._vocab_size :] = -torch.inf
        return logits

    @torch.inference_mode()
    def best(self, logits: Tensor) -> Tensor:
        """(T, V) -> (T,) int64 on the host: the arg-max of each row, -1 where it is no finite number."""
        return best_columns(logits)

    @torch.inference_mode()
    def best_of(self, features: Tensor, wanted: Sequence[int] | None = None) -> Tensor:
        """(T, H) -> (T,) int64 on the host: ``best`` of the rows' ``logits``, which need not exist for it."""
        return self.model.best(self._rows(features, wanted), self._vocab_size)

    def _rows(self, features: Tensor, wanted: Sequence[int] | None) -> Tensor:
        if wanted is None or len(wanted) == len(features):
            return features
        return features[on_device(torch.tensor(wanted), self.device)]

    def features_of(self, slots: Slots) -> Tensor:
        """(R, H) on the CPU, in the model's dtype."""
        return self._features[on_device(torch.from_numpy(slots.astype("int64")), self.device)].cpu()
