"""Drafter and target of ``speculative.cycle`` over real networks, for tests: no engine, no service, no wire."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.kv_cache.slots import SlotPool, Slots, SlotTable
from eagle2.models.checkpoint import DraftConfig, TargetConfig, load_tensors
from eagle2.models.draft import DraftModel
from eagle2.models.target import TargetModel
from eagle2.speculative.accept import Acceptance
from eagle2.speculative.tree import Tree

GOLDEN = Path(__file__).parent / "golden"


def load_target(name: str, dtype: torch.dtype = torch.float32) -> TargetModel:
    folder = GOLDEN / f"target_{name}"
    return TargetModel(TargetConfig.from_folder(folder), load_tensors(folder), dtype=dtype)


def load_head(
    name: str, target: TargetModel, dtype: torch.dtype = torch.float32, token_ids: Tensor | None = None
) -> DraftModel:
    folder = GOLDEN / f"head_{name}"
    config, weights = DraftConfig.from_folder(folder), load_tensors(folder)
    return DraftModel(config, weights, target.embedding, target.head_weight, dtype=dtype, token_ids=token_ids)


class PooledTarget:
    """The target with B sequences in a slot pool."""

    def __init__(self, model: TargetModel, prompts: list[list[int]], num_slots: int = 4096) -> None:
        self.model = model
        self.pool = SlotPool(num_slots)
        self.kv = model.new_pool(num_slots)
        self.tables = [SlotTable(self.pool) for _ in prompts]
        builder = RowsBuilder()
        for table, prompt in zip(self.tables, prompts, strict=True):
            table.extend(len(prompt))
            builder.add_span(table.slots, 0, prompt)
        features = model.forward(builder.build(model.device), self.kv)
        self.prompt_features = list(features.split([len(prompt) for prompt in prompts]))
        self.prompt_logits = model.logits(torch.stack([part[-1] for part in self.prompt_features]))
        self._nodes: list[Slots] = []
        self._features: list[Tensor] = []

    def verify(self, tree: Tree) -> Tensor:
        builder = RowsBuilder()
        self._nodes = [self.pool.allocate(tree.num_nodes) for _ in self.tables]
        paths, depths = tree.paths().numpy(), tree.depths().numpy()
        for b, table in enumerate(self.tables):
            slots = np.where(paths[b] >= 0, self._nodes[b][paths[b]], -1).astype(np.int32)
            builder.add_nodes(table.slots, tree.tokens[b].tolist(), depths[b], slots)
        features = self.model.forward(builder.build(self.model.device), self.kv)
        self._features = list(features.split(tree.num_nodes))
        return self.model.logits(features).view(len(self.tables), tree.num_nodes, -1)

    def commit(self, acceptance: Acceptance) -> list[Tensor]:
        rows = []
        for b, table in enumerate(self.tables):
            path = acceptance.path[b, : int(acceptance.counts[b]) + 1].tolist()
            table.commit(self._nodes[b], path)
            rows.append(self._features[b][path])
        return rows


class PooledDrafter:
    """The draft head with B sequences in a slot pool."""

    def __init__(self, model: DraftModel, batch: int, num_slots: int = 4096) -> None:
        self.model = model
        self.pool = SlotPool(num_slots)
        self.kv = model.new_pool(num_slots)
        self.tables = [SlotTable(self.pool) for _ in range(batch)]
        self._levels: list[np.ndarray] = []

    def extend(self, features: list[Tensor], tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
        for level in self._levels:
            self.pool.release(level.reshape(-1))
        self._levels = []
        builder = RowsBuilder()
        for table, ids in zip(self.tables, tokens, strict=True):
            first = len(table)
            table.extend(len(ids))
            builder.add_span(table.slots.copy(), first, ids.tolist())
        out = self.model.forward(builder.build(self.model.device), torch.cat(list(features)), self.kv)
        last = out[torch.tensor([len(ids) for ids in tokens]).cumsum(0) - 1]
        return last, self.model.logits(last)

    def step(self, tokens: Tensor, features: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        batch, k = tokens.shape
        own = self.pool.allocate(batch * k).reshape(batch, k)
        self._levels.append(own)
        rows = np.concatenate(self._levels, axis=1)
        builder = RowsBuilder()
        for b, table in enumerate(self.tables):
            paths = np.concatenate([rows[b][ancestors[b].numpy()], own[b][:, None]], axis=1).astype(np.int32)
            builder.add_nodes(table.slots, tokens[b].tolist(), np.full(k, paths.shape[1] - 1), paths)
        out = self.model.forward(builder.build(self.model.device), features.reshape(batch * k, -1), self.kv)
        return out.view(batch, k, -1), self.model.logits(out).view(batch, k, -1)
