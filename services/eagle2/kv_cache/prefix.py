"""A radix index over token ids: which slots hold the keys and values of a text's beginning.

Texts that begin alike share a path from the root; an edge carries a run of tokens and their slots. The index is one
owner of every slot in it. Sequences that use a prefix are further owners, so the slots' reference counts say what may
go: only what nobody else owns is evicted, from the ends of the least recently used paths inwards, so that what
remains is always a beginning. Each tenant has a root of its own; nothing is ever found across.

Not safe for threads: the index belongs to whoever allocates from its pool.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from eagle2.kv_cache.slots import SlotPool, Slots

Tokens = NDArray[np.int64]

_NO_SLOTS: Slots = np.empty(0, dtype=np.int32)


class _Node:
    """A run of tokens behind its parent's. Nodes that were last used together, one path, have the same ``used``."""

    __slots__ = ("children", "parent", "slots", "tokens", "used")

    def __init__(self, parent: _Node | None, tokens: Tokens, slots: Slots) -> None:
        self.parent, self.tokens, self.slots = parent, tokens, slots
        self.children: dict[int, _Node] = {}
        self.used = 0

    @property
    def is_leaf(self) -> bool:
        return self.parent is not None and not self.children


class PrefixIndex:
    """Slots by tenant and tokens, over one pool; gives them up, least recently used first, when the pool asks.

    ``version`` grows whenever more can be found than before; ``num_evicted`` counts the slots that were given up.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        pool.reclaim = self._reclaim
        self._roots: dict[str, _Node] = {}
        # Leaves by last use. An entry is stale when its node has been used since, has children or is gone.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._serial = itertools.count()  # before the node in an entry, since nodes cannot be compared
        self._clock = 0
        self._num_slots = 0
        self._num_nodes = 0
        self.num_evicted = 0
        self.version = 0

    def __len__(self) -> int:
        """Slots in the index, those that sequences use too."""
        return self._num_slots

    def match(self, tenant: str, tokens: Tokens) -> Slots:
        """(n,) slots of the longest known beginning of ``tokens``, the caller not among their owners yet."""
        self._clock += 1
        node, found, done = self._roots.get(tenant), [_NO_SLOTS], 0
        while node is not None and done < len(tokens):
            node = node.children.get(int(tokens[done]))
            if node is not None:
                common = _common(node.tokens, tokens[done:])
                found.append(node.slots[:common])
                done += common
                self._touch(node)
                if common < len(node.tokens):
                    break
        return np.concatenate(found)

    def insert(self, tenant: str, tokens: Tokens, slots: Slots) -> Slots:
        """Keep ``slots``, which hold ``tokens`` from position 0 on and have an owner, where the index has none yet.

        Returns the index's own slots for all of ``tokens``; they differ from ``slots`` where it knew them already.
        """
        assert len(tokens) == len(slots), f"{len(tokens)} tokens in {len(slots)} slots"
        if not len(tokens):
            return slots
        self._clock += 1
        node = self._roots.setdefault(tenant, _Node(None, tokens[:0], _NO_SLOTS))
        kept, done = [_NO_SLOTS], 0
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                self._append(node, tokens[done:].copy(), slots[done:].copy())
                kept.append(slots[done:])
                break
            common = _common(child.tokens, tokens[done:])
            if common < len(child.tokens) and done + common < len(tokens):
                child = self._split(child, common)
            kept.append(child.slots[:common])
            done += common
            self._touch(child)
            node = child
        return np.concatenate(kept)

    def evict(self, count: int) -> int:
        """Give up to ``count`` idle slots back to the pool; returns how many there were."""
        freed, busy = 0, []
        while freed < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if used != node.used or not node.is_leaf:
                continue
            taken = min(self._pool.idle_tail(node.slots), count - freed)
            freed += taken
            if taken < len(node.tokens):
                busy.append(node)
            self._cut(node, taken)
        for node in busy:
            self._push(node)
        self.num_evicted += freed
        return freed

    def clear(self) -> None:
        """Forget everything; slots that sequences use stay theirs."""
        for node in self._nodes():
            self._pool.drop(node.slots)
        self._roots.clear()
        self._leaves.clear()
        self._num_slots = self._num_nodes = 0

    @property
    def slots(self) -> Slots:
        """(len(self),) every slot of the index, in no particular order."""
        return np.concatenate([_NO_SLOTS, *(node.slots for node in self._nodes())])

    def check_integrity(self) -> None:
        """Raises AssertionError unless the index is a tree without empty edges whose leaves can all be evicted."""
        nodes = list(self._nodes())
        assert len(nodes) == self._num_nodes, f"{len(nodes)} nodes, {self._num_nodes} were counted"
        slots = self.slots
        assert len(slots) == len(self) == len(np.unique(slots)), "a slot is twice in the index, or was not counted"
        entries = {id(node) for used, _, node in self._leaves if used == node.used}
        for node in nodes:
            assert len(node.tokens) == len(node.slots) > 0, "an edge without tokens or slots"
            assert node.parent is not None, "a node that is no longer in the tree"
            assert node.parent.children[int(node.tokens[0])] is node, "a node under another's token"
            assert not node.is_leaf or id(node) in entries, "a leaf that cannot be evicted"
            assert all(node.used >= child.used for child in node.children.values()), "a node used before its child"
        assert all(root.children for root in self._roots.values()), "a tenant without prefixes"

    def _reclaim(self, count: int) -> None:
        self.evict(count)

    def _append(self, node: _Node, tokens: Tokens, slots: Slots) -> None:
        """Put a run behind ``node``: into it where nothing follows it yet, else as a child."""
        self._pool.keep(slots)
        self._num_slots += len(slots)
        self.version += 1
        if node.is_leaf:
            node.tokens, node.slots = np.concatenate([node.tokens, tokens]), np.concatenate([node.slots, slots])
            return
        child = _Node(node, tokens, slots)
        node.children[int(tokens[0])] = child
        self._num_nodes += 1
        self._touch(child)

    def _split(self, node: _Node, length: int) -> _Node:
        """Make the first ``length`` tokens of an edge a node of their own, and return that."""
        assert node.parent is not None
        assert 0 < length < len(node.tokens)
        upper = _Node(node.parent, node.tokens[:length], node.slots[:length])
        node.parent.children[int(node.tokens[0])] = upper
        node.parent, node.tokens, node.slots = upper, node.tokens[length:], node.slots[length:]
        upper.children[int(node.tokens[0])] = node
        self._num_nodes += 1
        return upper

    def _cut(self, node: _Node, count: int) -> None:
        """Take the last ``count`` tokens from a leaf, and the leaf from the tree when none is left."""
        if not count:
            return
        left, first = len(node.tokens) - count, int(node.tokens[0])
        self._pool.drop(node.slots[left:])
        self._num_slots -= count
        node.tokens, node.slots = node.tokens[:left].copy(), node.slots[:left].copy()
        if left:
            return
        parent = node.parent
        assert parent is not None
        del parent.children[first]
        node.parent = None
        self._num_nodes -= 1
        if parent.is_leaf:
            self._push(parent)
        elif parent.parent is None and not parent.children:
            self._roots = {tenant: root for tenant, root in self._roots.items() if root is not parent}

    def _touch(self, node: _Node) -> None:
        node.used = self._clock
        if node.is_leaf:
            self._push(node)

    def _push(self, node: _Node) -> None:
        heapq.heappush(self._leaves, (node.used, next(self._serial), node))
        if len(self._leaves) > 4 * self._num_nodes + 64:
            # Every use has left an entry behind; those that still say something are no more than the nodes.
            self._leaves = [(leaf.used, next(self._serial), leaf) for leaf in self._nodes() if leaf.is_leaf]
            heapq.heapify(self._leaves)

    def _nodes(self) -> Iterator[_Node]:
        """All nodes but the roots."""
        left = [child for root in self._roots.values() for child in root.children.values()]
        while left:
            node = left.pop()
            left.extend(node.children.values())
            yield node


def _common(a: Tokens, b: Tokens) -> int:
    """How many tokens both begin with."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length
