"""The proposer's side of a draft step: head rows in, trees out. A cache that can be rebuilt."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.kv_cache.slots import SlotPool, Slots, SlotTable
from eagle2.models.draft import DraftModel
from eagle2.speculative.draft import Policy, TreeShape, draft_trees
from eagle2.transport.features import FeatureRangeError, features_as
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep, DraftTree


@dataclass(slots=True)
class _Taken:
    """An entry whose rows go into this step's forward."""

    place: int  # among the step's entries
    entry: DraftEntry
    table: SlotTable
    features: Tensor
    last_row: int  # in the flat batch


class DraftRunner:
    """A ``DraftHandler``: the draft head, its slots, and the rows held for each sequence.

    ``vocab_size`` bounds the ids that may be drafted (a padded lm_head has more rows than the tokenizer has ids).
    Trees are grown over the columns of the head's logits; ids take their place where a tree meets the head or leaves.
    ``policy`` makes the trees; measurements set other ones.
    """

    def __init__(
        self,
        model: DraftModel,
        num_slots: int,
        *,
        incarnation: int,
        vocab_size: int | None = None,
        policy: Policy = draft_trees,
    ) -> None:
        self.policy = policy
        self._model = model
        self._incarnation = incarnation
        self._vocab_size = vocab_size or model.config.vocab_size
        assert model.token_ids is None or int(model.token_ids.max()) < self._vocab_size, "ids that cannot come out"
        self._pool = SlotPool(num_slots)
        self._kv = model.new_pool(num_slots)
        self._tables: dict[int, SlotTable] = {}

    @property
    def pool(self) -> SlotPool:
        return self._pool

    def warm_up(self) -> None:
        """Draft once, so that the first request does not wait for kernels to be compiled."""
        features = torch.zeros(1, self._model.config.hidden_size, dtype=self._model.dtype)
        entry = DraftEntry(sequence=-1, cycle=0, base=0, features=features, tokens=torch.zeros(1, dtype=torch.int64))
        self.handle(DraftStep(incarnation=0, step=0, depth=2, top_k=2, num_draft_tokens=3, entries=(entry,)))
        self.reset()

    def reset(self) -> None:
        for sequence in list(self._tables):
            self._close(sequence)

    def check_integrity(self) -> None:
        self._pool.check_integrity(table.slots for table in self._tables.values())

    @torch.inference_mode()
    def handle(self, step: DraftStep) -> DraftReply:
        received = time.time_ns()
        for sequence in step.closed:
            self._close(sequence)
        shape = TreeShape(step.depth, step.top_k, step.num_draft_tokens + 1)
        builder = RowsBuilder()
        taken: list[_Taken] = []
        trees: dict[int, DraftTree] = {}
        reserved = 0
        for place, entry in enumerate(step.entries):
            beam = beam_slots(shape) if entry.draft else 0
            result = self._take(place, entry, builder, reserved + beam)
            if isinstance(result, _Taken):
                taken.append(result)
                reserved += beam
            else:
                trees[place] = self._reply(entry, result)
        if taken:
            self._draft(builder, taken, shape, trees)
        return DraftReply(
            incarnation=self._incarnation,
            step=step.step,
            trees=tuple(trees[place] for place in range(len(step.entries))),
            received=received,
            finished=time.time_ns(),
            slots_used=self._pool.num_used,
            slots_total=self._pool.num_slots,
        )

    def _take(self, place: int, entry: DraftEntry, builder: RowsBuilder, reserved: int) -> _Taken | DraftStatus:
        """Bring the sequence to ``base`` rows and append the new ones, or say why not."""
        rows = entry.features.shape[0]
        table = self._tables.get(entry.sequence)
        if table is None:
            table = SlotTable(self._pool)
        if len(table) < entry.base:
            return DraftStatus.MISSING
        if entry.base + rows > self._model.config.max_position_embeddings:
            return DraftStatus.TOO_LONG
        table.truncate(entry.base)
        if rows == 0:
            # Without a new row there is no output to draft from: ask for the last one again.
            table.truncate(max(entry.base - 1, 0))
            return DraftStatus.MISSING
        try:
            features = features_as(entry.features, self._model.dtype).to(self._model.device)
        except FeatureRangeError:
            return DraftStatus.NON_FINITE
        if not bool(features.isfinite().all()):
            return DraftStatus.NON_FINITE
        if rows + reserved > self._pool.num_free:
            return DraftStatus.FULL
        self._tables[entry.sequence] = table
        table.extend(rows)
        builder.add_span(table.slots.copy(), entry.base, entry.tokens.tolist())
        return _Taken(place, entry, table, features, len(builder) - 1)

    def _draft(self, builder: RowsBuilder, taken: list[_Taken], shape: TreeShape, trees: dict[int, DraftTree]) -> None:
        """One forward of all new rows, then the trees of those that asked for one; fills ``trees`` by place."""
        features = torch.cat([item.features for item in taken])
        outputs = self._model.forward(builder.build(self._model.device), features, self._kv)
        last = outputs[[item.last_row for item in taken]]
        sound = last.isfinite().all(dim=1).tolist()
        drafting = [i for i, item in enumerate(taken) if item.entry.draft and sound[i]]
        for i, item in enumerate(taken):
            if not sound[i]:
                item.table.truncate(item.entry.base)
                trees[item.place] = self._reply(item.entry, DraftStatus.NON_FINITE)
            elif not item.entry.draft:
                trees[item.place] = self._reply(item.entry, DraftStatus.SYNCED)
        if not drafting:
            return
        last = last[drafting]
        items = [taken[i] for i in drafting]
        roots = torch.stack([item.entry.tokens[-1] for item in items]).to(self._model.device)
        with _Beam(self, [item.table for item in items]) as beam:
            tree = self.policy(beam, last, self.logits(last), roots, shape)
        for i, item in enumerate(items):
            nodes = self._model.ids_of(tree.tokens[i, 1:]).cpu(), tree.parents[i, 1:].cpu(), tree.scores[i, 1:].cpu()
            trees[item.place] = self._reply(item.entry, DraftStatus.OK, *nodes)

    def logits(self, features: Tensor) -> Tensor:
        logits = self._model.logits(features)
        if self._vocab_size < logits.shape[1]:
            logits[:, self._vocab_size :] = -torch.inf
        return logits

    def _reply(self, entry: DraftEntry, status: DraftStatus, *nodes: Tensor) -> DraftTree:
        if not nodes:
            nothing = torch.empty(0, dtype=torch.int64)
            nodes = nothing, nothing, torch.empty(0)
        table = self._tables.get(entry.sequence)
        return DraftTree(entry.sequence, entry.cycle, status, 0 if table is None else len(table), *nodes)

    def _close(self, sequence: int) -> None:
        table = self._tables.pop(sequence, None)
        if table is not None:
            table.free()


def beam_slots(shape: TreeShape) -> int:
    """Head rows that one sequence's expansion needs for a moment: the beam of every level but the last."""
    return 0 if shape.num_nodes == 1 else (shape.depth - 1) * shape.top_k


class _Beam:
    """The ``DraftNetwork`` of one expansion: beam rows live in slots that are given back at its end."""

    def __init__(self, runner: DraftRunner, tables: list[SlotTable]) -> None:
        self._runner = runner
        self._contexts: list[Slots] = [table.slots.copy() for table in tables]
        self._levels: list[np.ndarray] = []  # (B, K) slots a level

    def __enter__(self) -> _Beam:
        return self

    def __exit__(self, *exc: object) -> None:
        for slots in self._levels:
            self._runner.pool.release(slots.reshape(-1))

    def step(self, tokens: Tensor, features: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        batch, k = tokens.shape
        own = self._runner.pool.allocate(batch * k).reshape(batch, k)
        self._levels.append(own)
        rows = np.stack(self._levels, axis=1).reshape(batch, -1)  # (B, l*K + r)
        earlier = np.take_along_axis(rows[:, None, :], ancestors.cpu().numpy(), axis=2)
        paths = np.concatenate([earlier, own[:, :, None]], axis=2).astype(np.int32)
        depths = np.full(k, paths.shape[2] - 1)
        builder = RowsBuilder()
        model = self._runner._model
        for context, ids, path in zip(self._contexts, model.ids_of(tokens).tolist(), paths, strict=True):
            builder.add_nodes(context, ids, depths, path)
        outputs = model.forward(builder.build(model.device), features.reshape(batch * k, -1), self._runner._kv)
        logits = self._runner.logits(outputs)
        return outputs.view(batch, k, -1), logits.view(batch, k, -1)
