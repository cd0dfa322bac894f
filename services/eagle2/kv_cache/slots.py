"""Token slots, page size 1: a pool with reference counts, and a table of slots per sequence.

Tree nodes get slots like any token. Accepting a path keeps its slots in order and frees the others; nothing is
copied. The KV tensors themselves belong to the models; this module only says who owns which index of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int32]


class OutOfSlotsError(Exception):
    """Fewer slots are free than were asked for."""


class SlotPool:
    """Hands out slot indices 0..num_slots-1 and counts their owners.

    One owner may be a prefix index, which *keeps* slots for tokens that may come again. A slot that nobody else owns is
    idle then: it holds a token, and is given up as soon as it is asked for.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a slot pool needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        # Gives up that many idle slots; set by who keeps them.
        self.reclaim: Callable[[int], None] | None = None
        self._references = np.zeros(num_slots, dtype=np.int32)
        self._kept = np.zeros(num_slots, dtype=np.bool_)
        self._num_idle = 0
        # A stack whose top is the lowest index at the start, so that a fresh pool fills from the front.
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_idle(self) -> int:
        """Slots that are kept and have no other owner."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        """Slots that can be allocated: those that are free, and those that can be reclaimed."""
        return self._num_free + self._num_idle

    @property
    def num_used(self) -> int:
        """Slots that cannot be had: sequences and their trees hold them."""
        return self.num_slots - self.num_available

    def allocate(self, count: int) -> Slots:
        """``count`` slots with one owner each. Raises ``OutOfSlotsError``, then nothing has changed."""
        if count > self.num_available:
            raise OutOfSlotsError(f"{count} slots were asked for, {self.num_available} of {self.num_slots} are free")
        if count > self._num_free:
            assert self.reclaim is not None, "idle slots that nobody can give up"
            self.reclaim(count - self._num_free)
            assert count <= self._num_free, "idle slots were not given up"
        taken = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._references[taken] = 1
        return taken

    def retain(self, slots: Slots) -> None:
        """One more owner for each slot."""
        assert (self._references[slots] > 0).all(), "a free slot cannot get a second owner"
        self._num_idle -= self._count_idle(slots)
        np.add.at(self._references, slots, 1)

    def release(self, slots: Slots) -> None:
        """One owner less for each slot; those without owners are free again."""
        if not len(slots):
            return
        kept = self._kept[slots]
        any_kept = bool(kept.any())  # of a tree's slots none is
        if any_kept:
            self._num_idle -= self._count_idle(slots)
        np.subtract.at(self._references, slots, 1)
        left = self._references[slots]
        assert left.min() >= 0, "a slot was released more often than it was taken"
        if any_kept:
            self._num_idle += self._count_idle(slots)
            assert (left[kept] > 0).all(), "a kept slot was released by somebody who does not own it"
        freed = np.unique(slots[left == 0])[::-1]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def keep(self, slots: Slots) -> None:
        """Become an owner that holds on to ``slots`` (distinct ones, owned by somebody) until they are needed."""
        assert not self._kept[slots].any(), "a slot cannot be kept twice"
        self.retain(slots)
        self._kept[slots] = True

    def drop(self, slots: Slots) -> None:
        """No longer keep ``slots``; the idle ones are free again."""
        assert self._kept[slots].all(), "a slot that is not kept cannot be dropped"
        self._num_idle -= self._count_idle(slots)
        self._kept[slots] = False
        self.release(slots)

    def idle_tail(self, slots: Slots) -> int:
        """How many of ``slots``, counted from the end, only their keeper owns."""
        busy = np.nonzero(self._references[slots] > 1)[0]
        return len(slots) - (int(busy[-1]) + 1 if len(busy) else 0)

    def count_used(self, slots: Slots) -> int:
        """How many of ``slots``, owned and distinct ones, somebody other than their keeper owns."""
        return len(slots) - self._count_idle(slots)

    def _count_idle(self, slots: Slots) -> int:
        idle = slots[self._kept[slots] & (self._references[slots] == 1)]
        return len(np.unique(idle)) if len(idle) else 0

    def check_integrity(self, owners: Iterable[Sequence[int] | Slots]) -> None:
        """Raises AssertionError unless ``owners``, all holders of slots, explain every reference and none is lost."""
        counted = np.zeros(self.num_slots, dtype=np.int32)
        for slots in owners:
            np.add.at(counted, np.asarray(slots, dtype=np.int64), 1)
        wrong = np.nonzero(counted != self._references)[0]
        assert not len(wrong), (
            f"slot {wrong[0]} has {self._references[wrong[0]]} references but {counted[wrong[0]]} owners"
        )
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == len(free), "a slot is twice in the free list"
        assert (self._references[free] == 0).all(), "an owned slot is in the free list"
        assert len(free) == int((self._references == 0).sum()), "a slot without owners is not in the free list"
        assert not self._kept[free].any(), "a kept slot is in the free list"
        idle = int((self._kept & (self._references == 1)).sum())
        assert self._num_idle == idle, f"{idle} slots are idle, {self._num_idle} were counted"


class SlotTable:
    """The slots of one sequence's committed tokens, by position."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._slots = np.empty(64, dtype=np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def slots(self) -> Slots:
        """(length,) int32, a view: slot of position 0, 1, ..."""
        return self._slots[: self._length]

    def append(self, slots: Slots) -> None:
        """Append slots that were allocated for this sequence."""
        needed = self._length + len(slots)
        if needed > len(self._slots):
            grown = np.empty(max(needed, 2 * len(self._slots)), dtype=np.int32)
            grown[: self._length] = self.slots
            self._slots = grown
        self._slots[self._length : needed] = slots
        self._length = needed

    def extend(self, count: int) -> Slots:
        """Append ``count`` fresh slots and return them. Raises ``OutOfSlotsError``."""
        fresh = self._pool.allocate(count)
        self.append(fresh)
        return fresh

    def share(self, slots: Slots) -> None:
        """Append slots that another owner holds too (a shared prefix)."""
        self._pool.retain(slots)
        self.append(slots)

    def adopt(self, slots: Slots) -> None:
        """Use ``slots``, which another owner holds for the same tokens, for the first positions and those behind."""
        own = min(len(slots), self._length)
        self._pool.retain(slots)
        self._pool.release(self._slots[:own].copy())
        self._slots[:own] = slots[:own]
        self.append(slots[own:])

    def commit(self, node_slots: Slots, path: Sequence[int]) -> None:
        """Keep the slots of the nodes on ``path``, in order, and free the other nodes' slots.

        node_slots: slots that were allocated for a tree, by node.
        """
        kept = node_slots[np.asarray(path, dtype=np.int64)]
        dropped = np.ones(len(node_slots), dtype=bool)
        dropped[np.asarray(path, dtype=np.int64)] = False
        self._pool.release(node_slots[dropped])
        self.append(kept)

    def truncate(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        assert 0 <= length <= self._length, f"cannot truncate {self._length} positions to {length}"
        self._pool.release(self._slots[length : self._length].copy())
        self._length = length

    def free(self) -> None:
        self.truncate(0)
