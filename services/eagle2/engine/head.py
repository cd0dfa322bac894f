"""The draft head on its device: its forwards, the slots of its rows, and the beam of an expansion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.engine.graphs import ForwardGraphs, GraphLimits, on_device
from eagle2.kv_cache.slots import SlotPool, Slots
from eagle2.models.draft import DraftModel
from eagle2.models.rows import Rows
from eagle2.speculative.draft import TreeShape

if TYPE_CHECKING:
    from eagle2.models.grower import Grown


class HeadRunner:
    """The head and the KV of its rows.

    ``vocab_size`` bounds the ids that may be drafted (a padded lm_head has more rows than the tokenizer has ids).
    Trees are grown over the columns of the head's logits; ids take their place where a tree meets the head or leaves.
    ``graphs``: forwards up to these limits are recorded; for GPUs.
    """

    def __init__(
        self,
        model: DraftModel,
        num_slots: int,
        *,
        vocab_size: int | None = None,
        graphs: GraphLimits | None = None,
    ) -> None:
        self._vocab_size = vocab_size or model.config.vocab_size
        assert model.token_ids is None or int(model.token_ids.max()) < self._vocab_size, "ids that cannot come out"
        columns = model.config.vocab_size if model.token_ids is None else len(model.token_ids)
        self._num_columns = min(columns, self._vocab_size)
        self.model = model
        self.pool = SlotPool(num_slots)
        self._kv = model.new_pool(num_slots)
        self._graphs = None
        if graphs is not None:
            inputs = model.config.hidden_size, model.dtype
            self._graphs = ForwardGraphs(self._compute_recorded, model.device, graphs, features=inputs)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward(self, rows: Rows, features: Tensor) -> Tensor:
        """Predicted next features (T, H), overwritten by the next forward. rows: on the host. features (T, H): the
        target's, or a parent row's output."""
        features = on_device(features, self.device)
        outputs = None if self._graphs is None else self._graphs.run(rows, features)
        return self.compute(rows.to(self.device), features) if outputs is None else outputs

    def warm_up(self) -> None:
        """Record what can be recorded ahead."""
        if self._graphs is not None:
            self._graphs.record_all()

    def compute(self, rows: Rows, features: Tensor) -> Tensor:
        """As ``forward``, launch by launch, of rows and features that are on the device."""
        return self.model.forward(rows, features, self._kv)

    def can_grow(self, shape: TreeShape) -> bool:
        """Whether ``grow`` is there, for trees of this shape."""
        # A K above what may be drafted takes columns along that can never come out.
        return self.model.grower is not None and shape.top_k <= self._num_columns

    def grow(
        self, rows: Rows, features: Tensor, ends: Sequence[int], drafting: Sequence[int], shape: TreeShape
    ) -> Grown:
        """The forward of new rows, spans of A sequences, and trees for those at ``drafting`` among them, at once.

        ends (A,): the last row of each sequence. ``can_grow`` must have said yes.
        """
        assert self.model.grower is not None
        own = beam_slots(shape)
        beams = self.pool.allocate(len(drafting) * own).reshape(len(drafting), own)
        try:
            return self.model.grower.grow(rows, features, self._kv, ends, drafting, beams, shape, self._num_columns)
        finally:
            self.pool.release(beams.reshape(-1))

    def _compute_recorded(self, rows: Rows, features: Tensor | None) -> Tensor:
        assert features is not None
        return self.compute(rows, features)

    def logits(self, features: Tensor) -> Tensor:
        """(T, H) -> (T, W) float32; columns beyond the vocabulary are -inf."""
        logits = self.model.logits(features)
        if self._vocab_size < logits.shape[1]:
            logits[:, self._vocab_size :] = -torch.inf
        return logits


class Beam:
    """The ``DraftNetwork`` of one expansion: beam rows live in slots that are given back at its end.

    contexts: each sequence's slots of its head rows, in order of position.
    """

    def __init__(self, head: HeadRunner, contexts: Sequence[Slots]) -> None:
        self._head = head
        self._contexts = contexts
        self._levels: list[Slots] = []  # (B, K) slots a level

    def __enter__(self) -> Beam:
        return self

    def __exit__(self, *exc: object) -> None:
        for slots in self._levels:
            self._head.pool.release(slots.reshape(-1))

    def step(self, tokens: Tensor, features: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        batch, k = tokens.shape
        own = self._head.pool.allocate(batch * k).reshape(batch, k)
        self._levels.append(own)
        rows = np.stack(self._levels, axis=1).reshape(batch, -1)  # (B, l*K + r)
        earlier = np.take_along_axis(rows[:, None, :], ancestors.cpu().numpy(), axis=2)
        paths = np.concatenate([earlier, own[:, :, None]], axis=2).astype(np.int32)
        depths = np.full(k, paths.shape[2] - 1)
        builder = RowsBuilder()
        ids = self._head.model.ids_of(tokens).tolist()
        for context, own_ids, path in zip(self._contexts, ids, paths, strict=True):
            builder.add_nodes(context, own_ids, depths, path)
        outputs = self._head.forward(builder.build(self._head.device), features.reshape(batch * k, -1))
        logits = self._head.logits(outputs)
        return outputs.view(batch, k, -1), logits.view(batch, k, -1)


def beam_slots(shape: TreeShape) -> int:
    """Head rows that one sequence's expansion needs for a moment: the beam of every level but the last."""
    return 0 if shape.num_nodes == 1 else (shape.depth - 1) * shape.top_k
