"""The proposer's side of a draft step: head rows in, trees out. A cache that can be rebuilt."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.engine.expansion import Expansion
from eagle2.engine.graphs import GraphLimits, on_device
from eagle2.engine.head import Beam, HeadRunner, beam_slots
from eagle2.engine.head_rows import HeadRows
from eagle2.kv_cache.slots import SlotPool, Slots
from eagle2.models.draft import DraftModel
from eagle2.speculative.draft import Policy, TreeShape, draft_trees
from eagle2.transport.features import FeatureRangeError, features_as
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep, DraftTree


@dataclass(slots=True)
class _Taken:
    """An entry whose rows go into this step's forward."""

    place: int  # among the step's entries
    entry: DraftEntry
    slots: Slots  # of all its sequence's rows
    features: Tensor
    last_row: int  # in the flat batch


class DraftRunner:
    """A ``DraftHandler``: the draft head, and the rows held of each sequence.

    ``vocab_size`` bounds the ids that may be drafted. ``prefix_cache``: whether rows are kept for later sequences that
    begin alike. ``policy`` makes the trees; measurements set other ones. ``graphs``: up to these limits forwards and
    expansions are recorded; for GPUs.
    """

    def __init__(
        self,
        model: DraftModel,
        num_slots: int,
        *,
        incarnation: int,
        vocab_size: int | None = None,
        prefix_cache: bool = True,
        policy: Policy = draft_trees,
        graphs: GraphLimits | None = None,
    ) -> None:
        self.policy = policy
        self._incarnation = incarnation
        self._head = HeadRunner(model, num_slots, vocab_size=vocab_size, graphs=graphs)
        # On a CPU trees grow step by step on the host, where nothing has to wait.
        on_gpu = model.device.type != "cpu" or graphs is not None
        self._expansion = Expansion(self._head, graphs) if on_gpu else None
        self._rows = HeadRows(self._head.pool, enabled=prefix_cache)

    @property
    def model(self) -> DraftModel:
        return self._head.model

    @property
    def pool(self) -> SlotPool:
        return self._head.pool

    def warm_up(self) -> None:
        """Draft once, so that the first request does not wait for kernels to be compiled."""
        features = torch.zeros(1, self.model.config.hidden_size, dtype=self.model.dtype)
        entry = DraftEntry(sequence=-1, cycle=0, base=0, features=features, tokens=torch.zeros(1, dtype=torch.int64))
        self.handle(DraftStep(incarnation=0, step=0, depth=2, top_k=2, num_draft_tokens=3, entries=(entry,)))
        self.reset()
        self._head.warm_up()

    def reset(self) -> None:
        """Forget every sequence, those that have ended too."""
        self._rows.reset()

    def check_integrity(self) -> None:
        self._rows.check_integrity()

    @torch.inference_mode()
    def handle(self, step: DraftStep) -> DraftReply:
        received = time.time_ns()
        for sequence in step.closed:
            self._rows.close(sequence)
        # Before any slot is promised to a beam: what a sequence takes over can no longer be evicted.
        for entry in step.entries:
            if entry.opening is not None and not entry.only_asks:
                self._rows.open(entry.sequence, entry.opening)
        shape = TreeShape(step.depth, step.top_k, step.num_draft_tokens + 1)
        builder = RowsBuilder()
        taken: list[_Taken] = []
        trees: dict[int, DraftTree] = {}
        reserved = 0
        for place, entry in enumerate(step.entries):
            if entry.only_asks:
                continue
            beam = beam_slots(shape) if entry.draft else 0
            result = self._take(place, entry, builder, reserved + beam)
            if isinstance(result, _Taken):
                taken.append(result)
                reserved += beam
            else:
                trees[place] = self._reply(entry, result)
        if taken:
            self._draft(builder, taken, shape, trees)
        for place, entry in enumerate(step.entries):
            if entry.opening is not None and entry.only_asks:
                self._rows.open(entry.sequence, entry.opening)
                trees[place] = self._reply(entry, DraftStatus.SYNCED)
        return DraftReply(
            incarnation=self._incarnation,
            step=step.step,
            trees=tuple(trees[place] for place in range(len(step.entries))),
            received=received,
            finished=time.time_ns(),
            slots_used=self.pool.num_used,
            slots_total=self.pool.num_slots,
            slots_cached=self.pool.num_idle,
        )

    def _take(self, place: int, entry: DraftEntry, builder: RowsBuilder, reserved: int) -> _Taken | DraftStatus:
        """Bring the sequence to ``base`` rows and append the new ones, or say why not."""
        rows = entry.features.shape[0]
        if self._rows.num_held(entry.sequence) < entry.base:
            return DraftStatus.MISSING
        if entry.base + rows > self.model.config.max_position_embeddings:
            return DraftStatus.TOO_LONG
        if rows == 0:
            # Without a new row there is no output to draft from: ask for the last one again.
            self._rows.truncate(entry.sequence, max(entry.base - 1, 0))
            return DraftStatus.MISSING
        self._rows.truncate(entry.sequence, entry.base)
        try:
            features = features_as(entry.features, self.model.dtype)
        except FeatureRangeError:
            return DraftStatus.NON_FINITE
        if not bool(features.isfinite().all()):
            return DraftStatus.NON_FINITE
        if rows + reserved > self.pool.num_available:
            return DraftStatus.FULL
        tokens = entry.tokens.tolist()
        slots = self._rows.extend(entry.sequence, entry.base, tokens)
        builder.add_span(slots, entry.base, tokens)
        return _Taken(place, entry, slots, features, len(builder) - 1)

    def _draft(self, builder: RowsBuilder, taken: list[_Taken], shape: TreeShape, trees: dict[int, DraftTree]) -> None:
        """One forward of all new rows, then the trees of those that asked for one; fills ``trees`` by place."""
        features = torch.cat([item.features for item in taken])
        if self._expansion is None and self.policy is draft_trees and self._head.can_grow(shape):
            sound = self._grow_at_once(builder, features, taken, shape, trees)
        else:
            sound = self._grow_after(builder, features, taken, shape, trees)
        for i, item in enumerate(taken):
            if sound[i]:
                self._rows.share(item.entry.sequence, has_tree=item.entry.draft)
                if not item.entry.draft:
                    trees[item.place] = self._reply(item.entry, DraftStatus.SYNCED)
        for i, item in enumerate(taken):
            if not sound[i]:
                self._rows.truncate(item.entry.sequence, item.entry.base)
                self._rows.forget()
                trees[item.place] = self._reply(item.entry, DraftStatus.NON_FINITE)

    def _grow_at_once(
        self, builder: RowsBuilder, features: Tensor, taken: list[_Taken], shape: TreeShape, trees: dict[int, DraftTree]
    ) -> list[bool]:
        """The forward and the trees in one call; whether outputs were made of numbers, for all that were taken."""
        drafting = [i for i, item in enumerate(taken) if item.entry.draft]
        ends = [item.last_row for item in taken]
        grown = self._head.grow(builder.build(), features, ends, drafting, shape)
        nodes = zip(grown.tokens.unbind(), grown.parents.unbind(), grown.scores.unbind(), strict=True)
        for i, one in zip(drafting, nodes, strict=True):
            trees[taken[i].place] = self._reply(taken[i].entry, DraftStatus.OK, *one)
        return grown.is_sound

    def _grow_after(
        self, builder: RowsBuilder, features: Tensor, taken: list[_Taken], shape: TreeShape, trees: dict[int, DraftTree]
    ) -> list[bool]:
        """As ``_grow_at_once``, operator by operator, level after level."""
        outputs = self._head.forward(builder.build(), features)
        last = outputs[on_device(torch.tensor([item.last_row for item in taken]), self._head.device)]
        if self._expansion is not None:
            sound = self._grow_on_device(self._expansion, last, taken, shape, trees)
        else:
            sound = last.isfinite().all(dim=1).tolist()
            drafting = [i for i, item in enumerate(taken) if item.entry.draft and sound[i]]
            if drafting:
                self._grow(last[drafting], [taken[i] for i in drafting], shape, trees)
        return sound

    def _grow(self, last: Tensor, items: list[_Taken], shape: TreeShape, trees: dict[int, DraftTree]) -> None:
        """Trees from the outputs (B, H) at each sequence's last row."""
        roots = torch.stack([item.entry.tokens[-1] for item in items]).to(self._head.device)
        with Beam(self._head, [item.slots for item in items]) as beam:
            tree = self.policy(beam, last, self._head.logits(last), roots, shape)
        for i, item in enumerate(items):
            nodes = self.model.ids_of(tree.tokens[i, 1:]).cpu(), tree.parents[i, 1:].cpu(), tree.scores[i, 1:].cpu()
            trees[item.place] = self._reply(item.entry, DraftStatus.OK, *nodes)

    def _grow_on_device(
        self, expansion: Expansion, last: Tensor, taken: list[_Taken], shape: TreeShape, trees: dict[int, DraftTree]
    ) -> list[bool]:
        """As ``_grow``, in one go with the check whether outputs are made of numbers, which it returns for all."""
        drafting = [i for i, item in enumerate(taken) if item.entry.draft]
        if len(drafting) == len(taken):
            sound = [True] * len(taken)
        else:  # rows of prompts: nothing that a cycle waits for
            sound = last.isfinite().all(dim=1).tolist()
            last = last[on_device(torch.tensor(drafting, dtype=torch.int64), self._head.device)]
        if drafting:
            items = [taken[i] for i in drafting]
            roots, contexts = [int(item.entry.tokens[-1]) for item in items], [item.slots for item in items]
            grown = expansion.grow(last, roots, contexts, shape, self.policy)
            for i, item, is_sound, *nodes in zip(
                drafting, items, grown.is_sound, grown.tokens, grown.parents, grown.scores, strict=True
            ):
                sound[i] = is_sound
                trees[item.place] = self._reply(item.entry, DraftStatus.OK, *nodes)
        return sound

    def _reply(self, entry: DraftEntry, status: DraftStatus, *nodes: Tensor) -> DraftTree:
        if not nodes:
            nothing = torch.empty(0, dtype=torch.int64)
            nodes = nothing, nothing, torch.empty(0)
        return DraftTree(entry.sequence, entry.cycle, status, self._rows.num_held(entry.sequence), *nodes)
