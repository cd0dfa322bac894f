"""Draft trees that grow without leaving the device: nothing is read back until all levels are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle2.engine.graphs import GraphLimits, GraphMemory, Places, Recording, Staging, on_device
from eagle2.engine.head import HeadRunner, beam_slots
from eagle2.kv_cache.slots import Slots
from eagle2.models.rows import Rows
from eagle2.speculative.draft import Policy, TreeShape, draft_trees
from eagle2.speculative.tree import Tree

# Of batch sizes and shapes; a budget that keeps asking for new ones grows the others launch by launch.
_MOST_RECORDINGS = 64


@dataclass(frozen=True, slots=True)
class Contexts:
    """Where the head's rows of B sequences lie, and the slots for the beams of one expansion; all on its device.

    tables: (B, L) int32, slots by position. lengths: (B,) int32. beams: (B, levels * K) int32, negative for a sequence
    that is padding, whose tree is not looked at.
    """

    tables: Tensor
    lengths: Tensor
    beams: Tensor


class DeviceBeam:
    """The ``DraftNetwork`` of one expansion whose rows, slots and paths are all put together on the device."""

    def __init__(self, head: HeadRunner, contexts: Contexts) -> None:
        self._head, self._contexts = head, contexts

    def step(self, tokens: Tensor, features: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        batch, k = tokens.shape
        level, at = ancestors.shape[2], self._contexts
        own = at.beams[:, level * k : (level + 1) * k]
        earlier = at.beams.gather(1, ancestors.flatten(1)).view(batch, k, level)
        lengths = at.lengths.repeat_interleave(k, output_size=batch * k)
        outputs = self._head.compute(
            Rows(
                tokens=self._head.model.ids_of(tokens).flatten(),
                positions=lengths.long() + level,
                slots=own.flatten(),
                starts=torch.arange(0, batch * k + 1, k, dtype=torch.int32, device=tokens.device),
                tables=at.tables,
                lengths=lengths,
                paths=torch.cat([earlier, own.unsqueeze(2)], dim=2).flatten(0, 1),
                path_lengths=torch.where(own >= 0, level + 1, 0).flatten().int(),
            ),
            features.reshape(batch * k, -1),
        )
        return outputs.view(batch, k, -1), self._head.logits(outputs).view(batch, k, -1)


@dataclass(frozen=True, slots=True)
class Grown:
    """What an expansion brought to the host in one transfer: ids and parents (B, n) int64 and scores (B, n) float32 of
    the drafted nodes, and for each sequence whether the output that its tree grew from was made of numbers."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    is_sound: list[bool]


class Expansion:
    """Grows the trees of a batch, recorded for each batch size and shape where ``limits`` are given."""

    def __init__(self, head: HeadRunner, limits: GraphLimits | None, memory: GraphMemory | None = None) -> None:
        self._head, self._limits = head, limits
        self._memory = memory or GraphMemory(head.device)
        self._recorded: dict[tuple[int, TreeShape], _Recorded] = {}

    @torch.inference_mode()
    def grow(
        self, last: Tensor, roots: Sequence[int], contexts: Sequence[Slots], shape: TreeShape, policy: Policy
    ) -> Grown:
        """last (B, H): the head's output at each sequence's last row; contexts: the slots of its rows in order."""
        batch, own = len(roots), beam_slots(shape)
        slots = self._head.pool.allocate(batch * own).reshape(batch, own)
        try:
            recorded = self._recording(batch, max(map(len, contexts)), shape, policy)
            if recorded is None:
                packed = self._launched(last, roots, contexts, slots, shape, policy)
            else:
                packed = recorded.run(last, roots, contexts, slots)
            numbers = packed[:, :batch].cpu()
        finally:
            self._head.pool.release(slots.reshape(-1))
        tokens, parents, scores = numbers[:, :, 1:]
        return Grown(tokens, parents, scores.int().view(torch.float32), (numbers[0, :, 0] > 0).tolist())

    def _recording(self, batch: int, context: int, shape: TreeShape, policy: Policy) -> _Recorded | None:
        limits = self._limits
        # Another policy than the one that serves belongs to a measurement.
        if limits is None or policy is not draft_trees or batch > limits.max_sequences or context > limits.max_context:
            return None
        size = min(1 << (batch - 1).bit_length(), limits.max_sequences)
        key = size, shape
        if key not in self._recorded:
            if len(self._recorded) == _MOST_RECORDINGS:
                return None
            self._recorded[key] = _Recorded(self._head, size, limits.max_context, shape, self._memory)
        return self._recorded[key]

    def _launched(
        self,
        last: Tensor,
        roots: Sequence[int],
        contexts: Sequence[Slots],
        slots: Slots,
        shape: TreeShape,
        policy: Policy,
    ) -> Tensor:
        device = self._head.device
        tables = np.zeros((len(contexts), max(map(len, contexts))), np.int32)
        for row, context in zip(tables, contexts, strict=True):
            row[: len(context)] = context
        at = Contexts(
            on_device(torch.from_numpy(tables), device),
            on_device(torch.tensor([len(context) for context in contexts], dtype=torch.int32), device),
            on_device(torch.from_numpy(slots), device),
        )
        return _packed(self._head, last, on_device(torch.tensor(list(roots)), device), at, shape, policy)


class _Recorded:
    """One recorded expansion: a batch size, a shape."""

    def __init__(self, head: HeadRunner, batch: int, max_context: int, shape: TreeShape, memory: GraphMemory) -> None:
        self._head, self._batch, self._memory, self._shape = head, batch, memory, shape
        self._places = Places()
        self._places.add("roots", batch)
        self._places.add("lengths", batch)
        self._places.add("beams", batch, max(beam_slots(shape), 1))
        self._places.add("tables", batch, max_context)
        self._staging = Staging(self._places.end, head.device)
        self._last = torch.zeros(batch, head.model.config.hidden_size, dtype=head.model.dtype, device=head.device)
        self._recording: Recording | None = None

    def run(self, last: Tensor, roots: Sequence[int], contexts: Sequence[Slots], slots: Slots) -> Tensor:
        numbers, places, count = self._staging.begin(), self._places, len(roots)
        for name, padding in (("roots", 0), ("lengths", 0), ("beams", -1)):
            places.of_array(name, numbers)[count:] = padding
        places.of_array("roots", numbers)[:count] = roots
        places.of_array("lengths", numbers)[:count] = [len(context) for context in contexts]
        if slots.shape[1]:
            places.of_array("beams", numbers)[:count] = slots
        tables = places.of_array("tables", numbers)
        for row, context in zip(tables, contexts, strict=False):
            row[: len(context)] = context
        self._staging.send(places.end - (self._batch - count) * tables.shape[1])
        self._last[:count].copy_(last)
        self._last[count:].zero_()
        if self._recording is None:
            self._recording = Recording(self._expand, self._head.device, self._memory)
        return self._recording.replay()

    def _expand(self) -> Tensor:
        numbers = self._staging.on_device
        tables, lengths, beams, roots = (
            self._places.of_tensor(name, numbers) for name in ("tables", "lengths", "beams", "roots")
        )
        at = Contexts(tables, lengths, beams)
        return _packed(self._head, self._last, roots.long(), at, self._shape, draft_trees)


def _packed(
    head: HeadRunner, last: Tensor, roots: Tensor, contexts: Contexts, shape: TreeShape, policy: Policy
) -> Tensor:
    """(3, B, N) int64: ids, parents and the bits of the scores; in the root's place of the first, whether ``last`` is
    made of numbers. One tensor, so that one transfer brings it all."""
    tree: Tree = policy(DeviceBeam(head, contexts), last, head.logits(last), roots, shape)
    is_sound = last.isfinite().all(dim=1).long()
    ids = torch.cat([is_sound.unsqueeze(1), head.model.ids_of(tree.tokens[:, 1:])], dim=1)
    return torch.stack([ids, tree.parents, tree.scores.view(torch.int32).long()])
