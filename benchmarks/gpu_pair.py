"""Both sides of a pair in one process on one device, cycle by cycle: what the GPU check tests and measures.

It needs torch and numpy alone, no server and no tokenizer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.engine.draft import DraftRunner
from eagle2.engine.graphs import GraphLimits
from eagle2.engine.target import TargetRunner
from eagle2.engine.trees import Forest, forest_of
from eagle2.kv_cache.slots import SlotTable
from eagle2.models.draft import DraftModel
from eagle2.models.target import TargetModel
from eagle2.speculative.accept import Acceptance, accept
from eagle2.speculative.draft import TreeShape
from eagle2.speculative.tree import Tree
from eagle2.transport.messages import DraftEntry, DraftStatus, DraftStep


@dataclass(frozen=True, slots=True)
class Cycle:
    """What a cycle did: the trees of all sequences, and what was accepted of them."""

    tree: Tree
    acceptance: Acceptance


class DevicePair:
    """A target and its head, and the sequences that they decode greedily.

    Without ``limits`` nothing is recorded. ``seconds`` adds up time by phase; with ``by_phase`` each phase waits for
    the device, so that its time is its own, and a cycle as a whole takes longer.
    """

    def __init__(
        self,
        target: TargetModel,
        head: DraftModel,
        num_slots: int,
        limits: GraphLimits | None,
        *,
        by_phase: bool = False,
    ) -> None:
        self.target = TargetRunner(target, num_slots, graphs=limits)
        self.drafts = DraftRunner(head, num_slots, incarnation=1, prefix_cache=False, graphs=limits)
        self.tables: list[SlotTable] = []
        self.tokens: list[list[int]] = []  # committed ones and the root
        self.by_phase = by_phase
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._held: list[int] = []
        self._step = 0

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Read prompts; returns each one's first token."""
        builder, last = RowsBuilder(), []
        for prompt in prompts:
            table = SlotTable(self.target.pool)
            table.extend(len(prompt))
            builder.add_span(table.slots, 0, list(prompt))
            last.append(len(builder) - 1)
            self.tables.append(table)
            self._held.append(0)
        roots: list[int] = self.target.best(self.target.logits(self.target.forward(builder.build()), last)).tolist()
        self.tokens += [[*prompt, root] for prompt, root in zip(prompts, roots, strict=True)]
        return roots

    def start_with_noise(self, batch: int, length: int, vocab_size: int) -> None:
        """Sequences of random tokens whose context was never computed: keys, values and features are noise."""
        generator = torch.Generator().manual_seed(0)
        for runner in (self.target, self.drafts._head):
            runner._kv.keys.normal_()
            runner._kv.values.normal_()
        self.target._features.normal_()
        for _ in range(batch):
            table = SlotTable(self.target.pool)
            table.extend(length)
            self.tables.append(table)
            self.tokens.append(torch.randint(0, vocab_size, (length + 1,), generator=generator).tolist())
            self._held.append(0)

    def hold(self, rows: int) -> None:
        """Let the head hold all rows but the last ``rows`` of each sequence, whatever they are."""
        for sequence, table in enumerate(self.tables):
            base = len(table) - rows
            self.drafts._rows.extend(sequence, 0, self.tokens[sequence][1 : base + 1])
            self._held[sequence] = base

    def cycle(self, shape: TreeShape, *, commit: bool = True) -> Cycle:
        """Draft, verify, accept; without ``commit`` everything is as before, so that it can be done again."""
        with self._phase("transfer"):
            entries = tuple(self._entry(sequence) for sequence in range(len(self.tables)))
        self._step += 1
        step = DraftStep(1, self._step, shape.depth, shape.top_k, shape.num_nodes - 1, entries=entries)
        with self._phase("draft"):
            reply = self.drafts.handle(step)
        for sequence, drafted in enumerate(reply.trees):
            assert drafted.status == DraftStatus.OK, f"the head answered {drafted.status.name}"
            if commit:
                self._held[sequence] = drafted.held
        trees, num_wrong = forest_of(self._roots(), reply.trees, self.target.model.config.vocab_size)
        assert not num_wrong, "what the head sent is no tree"
        return self.verify(trees, commit=commit)

    def verify(self, trees: Forest, *, commit: bool = True) -> Cycle:
        """One forward of all trees, and what the target makes of them. Trees of roots alone: a plain step."""
        with self._phase("verify"):
            builder = RowsBuilder()
            slots = self.target.pool.allocate(trees.num_nodes)
            tables = [table.slots for table in self.tables]
            builder.add_trees(tables, trees.sizes, trees.tokens, trees.depths, trees.paths(slots))
            logits = self.target.logits(self.target.forward(builder.build()))
        with self._phase("accept"):
            tree, best = trees.padded(), self.target.best(logits)
            firsts = torch.from_numpy(trees.starts)
            acceptance = accept(tree, lambda sequences, nodes: best[firsts[sequences] + nodes])
            for sequence, own in enumerate(np.split(slots, trees.starts[1:])):
                if not commit:
                    self.target.pool.release(own)
                    continue
                path = acceptance.path[sequence, : int(acceptance.counts[sequence]) + 1].tolist()
                self.tables[sequence].commit(own, path)
                self.tokens[sequence] += acceptance.committed_tokens(tree, sequence)
        return Cycle(tree, acceptance)

    def plain(self, *, commit: bool = True) -> None:
        """One token for each sequence."""
        self.verify(Forest.of_roots(self._roots()), commit=commit)

    def _roots(self) -> list[int]:
        return [tokens[-1] for tokens in self.tokens]

    def check_integrity(self) -> None:
        self.target.pool.check_integrity(table.slots for table in self.tables)
        self.drafts.check_integrity()

    def _entry(self, sequence: int) -> DraftEntry:
        base, end = self._held[sequence], len(self.tables[sequence])
        features = self.target.features_of(self.tables[sequence].slots[base:end])
        tokens = torch.tensor(self.tokens[sequence][base + 1 : end + 1], dtype=torch.int64)
        return DraftEntry(sequence, self._step, base, features, tokens)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.by_phase and self.target.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[name] += time.perf_counter() - began


def limits_for(shape: TreeShape, batch: int, context: int, *, prompt_rows: int = 0) -> GraphLimits:
    return GraphLimits(
        max_rows=max(batch * shape.num_nodes, prompt_rows),
        max_sequences=batch,
        max_context=context,
        max_path=shape.depth + 1,
    )


def random_weights(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Small random matrices, and ones for norms."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02, generator=generator)

    return {name: draw(shape) for name, shape in shapes.items()}
