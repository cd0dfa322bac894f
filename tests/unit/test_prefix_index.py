"""The radix index: a state machine against a plain dict, and what goes first when slots run out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from eagle2.kv_cache.prefix import PrefixIndex, Tokens
from eagle2.kv_cache.slots import OutOfSlotsError, SlotPool, Slots, SlotTable

Prefix = tuple[str, tuple[int, ...]]
"""A tenant and all tokens up to a position: what a slot of that position stands for."""

# Few tokens, so that texts begin alike and part again.
TEXTS = st.lists(st.integers(0, 2), max_size=12)
TENANTS = st.sampled_from(["one", "two"])


def array(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int64)


class Sequence:
    """A tenant's text whose KV is all computed."""

    def __init__(self, pool: SlotPool, tenant: str) -> None:
        self.tenant, self.table = tenant, SlotTable(pool)
        self.tokens: list[int] = []

    def prefix(self, position: int) -> Prefix:
        return self.tenant, tuple(self.tokens[: position + 1])


class IndexMachine(RuleBasedStateMachine):
    """Sequences that share, grow, leave their texts behind and end, beside a dict of what the index should know."""

    sequences = Bundle("sequences")

    @initialize(num_slots=st.integers(1, 60))
    def start(self, num_slots: int) -> None:
        self.pool = SlotPool(num_slots)
        self.index = PrefixIndex(self.pool)
        self.known: dict[Prefix, int] = {}
        self.holds: dict[int, Prefix] = {}  # what was last computed into a slot
        self.running: list[Sequence] = []

    def compute(self, sequence: Sequence, tokens: list[int]) -> None:
        """Append tokens and their KV, as far as there are slots: those that nobody uses are there to be had."""
        available = self.pool.num_available
        if len(tokens) > available:
            with pytest.raises(OutOfSlotsError, match=f"^{len(tokens)} slots .* {available} of"):
                sequence.table.extend(len(tokens))
            return
        slots = sequence.table.extend(len(tokens))
        self.forget_evicted()
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            sequence.tokens.append(token)
            assert slot not in self.known.values(), "a slot was handed out that the index still has"
            self.holds[slot] = sequence.prefix(len(sequence.tokens) - 1)

    def forget_evicted(self) -> None:
        left = set(self.index.slots.tolist())
        self.known = {prefix: slot for prefix, slot in self.known.items() if slot in left}

    def expected(self, tenant: str, tokens: list[int]) -> list[int]:
        slots: list[int] = []
        for end in range(1, len(tokens) + 1):
            slot = self.known.get((tenant, tuple(tokens[:end])))
            if slot is None:
                break
            slots.append(slot)
        return slots

    @rule(target=sequences, tenant=TENANTS, tokens=TEXTS)
    def begin(self, tenant: str, tokens: list[int]) -> Sequence:
        """A new text takes over what is known of it and computes the rest."""
        sequence = Sequence(self.pool, tenant)
        found = self.index.match(tenant, array(tokens))
        assert found.tolist() == self.expected(tenant, tokens)
        sequence.table.adopt(found)
        sequence.tokens = tokens[: len(found)]
        self.running.append(sequence)
        self.compute(sequence, tokens[len(found) :])
        return sequence

    @rule(sequence=sequences, tokens=TEXTS)
    def grow(self, sequence: Sequence, tokens: list[int]) -> None:
        self.compute(sequence, tokens)

    @rule(sequence=sequences)
    def keep(self, sequence: Sequence) -> None:
        """Leave a text to others while going on with it."""
        kept = self.index.insert(sequence.tenant, array(sequence.tokens), sequence.table.slots)
        for position, slot in enumerate(sequence.table.slots.tolist()):
            self.known.setdefault(sequence.prefix(position), slot)
        assert kept.tolist() == [self.known[sequence.prefix(i)] for i in range(len(sequence.tokens))]
        sequence.table.adopt(kept)

    @rule(target=sequences, sequence=consumes(sequences), keep=st.booleans())
    def end(self, sequence: Sequence, keep: bool) -> object:
        if keep:
            self.keep(sequence)
        sequence.table.free()
        self.running.remove(sequence)
        return multiple()

    @rule(count=st.integers(0, 30))
    def evict(self, count: int) -> None:
        """As many as are idle, and never one that a sequence uses."""
        idle = self.pool.num_idle
        assert self.index.evict(count) == min(count, idle)
        self.forget_evicted()

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.known.clear()
        assert self.pool.num_idle == 0

    @invariant()
    def nothing_is_lost_or_wrong(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.index.check_integrity()
        self.pool.check_integrity([self.index.slots, *(s.table.slots for s in self.running)])
        assert sorted(self.index.slots.tolist()) == sorted(self.known.values())
        assert len(self.index) == len(self.known)
        for prefix, slot in self.known.items():
            assert self.holds[slot] == prefix, "the index has something else in a slot"
            tenant, tokens = prefix
            assert len(tokens) == 1 or (tenant, tokens[:-1]) in self.known, "a text without its beginning"
        for sequence in self.running:
            held = [self.holds[slot] for slot in sequence.table.slots.tolist()]
            assert held == [sequence.prefix(i) for i in range(len(sequence.tokens))], "somebody wrote over a sequence"
        used = {slot for sequence in self.running for slot in sequence.table.slots.tolist()}
        assert self.pool.num_used == len(used)
        assert self.pool.num_idle == len(set(self.known.values()) - used)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for sequence in self.running:
                sequence.table.free()
            assert self.index.evict(self.pool.num_slots) == len(self.known)
            assert self.pool.num_free == self.pool.num_slots


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def kept(index: PrefixIndex, pool: SlotPool, tokens: list[int], tenant: str = "t") -> Slots:
    """A text that was computed, kept and ended."""
    table = SlotTable(pool)
    slots = table.extend(len(tokens)).copy()
    slots = index.insert(tenant, array(tokens), slots)
    table.free()
    return slots


def found(index: PrefixIndex, tokens: list[int], tenant: str = "t") -> int:
    return len(index.match(tenant, array(tokens)))


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    pool = SlotPool(64)
    index = PrefixIndex(pool)
    system = list(range(10))
    chats = [[*system, 100 + i, *range(20, 27)] for i in range(3)]
    for chat in chats:
        kept(index, pool, chat)
    assert len(index) == 10 + 3 * 8
    assert found(index, chats[0]) == 18, "used again: now the second is the oldest"
    index.evict(3)
    assert len(index.slots) == 31
    before = index.num_evicted
    index.evict(1)
    assert index.num_evicted == before + 1 == 4
    # Looking is using; each is looked at once, oldest last.
    assert found(index, chats[2]) == 18
    assert found(index, chats[0]) == 18
    assert found(index, chats[1]) == 14
    index.evict(8 + 8)
    assert [found(index, chat) for chat in chats] == [10, 14, 10], "the beginnings that all share stay to the last"
    index.evict(100)
    assert [found(index, chat) for chat in chats] == [0, 0, 0]
    assert pool.num_free == 64


def test_what_is_used_stays_however_old() -> None:
    pool = SlotPool(20)
    index = PrefixIndex(pool)
    old, new = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10]
    kept(index, pool, old)
    table = SlotTable(pool)
    table.adopt(index.match("t", array(old[:4])))
    kept(index, pool, new)
    assert index.evict(100) == 2 + 4, "behind what is used, and all of the other"
    assert found(index, old) == 4
    pool.check_integrity([index.slots, table.slots])
    table.free()
    assert index.evict(100) == 4


def test_an_allocation_evicts_only_what_it_lacks() -> None:
    pool = SlotPool(10)
    index = PrefixIndex(pool)
    kept(index, pool, [1, 2, 3, 4, 5, 6])
    assert (pool.num_free, pool.num_idle, pool.num_available, pool.num_used) == (4, 6, 10, 0)
    taken = pool.allocate(6)
    assert found(index, [1, 2, 3, 4, 5, 6]) == 4
    with pytest.raises(OutOfSlotsError, match=r"5 slots were asked for, 4 of 10 are free"):
        pool.allocate(5)
    assert len(index) == 4, "what does not help is not evicted"
    pool.check_integrity([index.slots, taken])


def test_a_tenant_finds_nothing_of_anothers() -> None:
    pool = SlotPool(20)
    index = PrefixIndex(pool)
    kept(index, pool, [1, 2, 3], "org_1")
    assert [found(index, [1, 2, 3], tenant) for tenant in ("org_1", "org_12", "", "org_")] == [3, 0, 0, 0]
    assert len(set(kept(index, pool, [1, 2, 3], "org_12")) & set(index.match("org_1", array([1, 2, 3])))) == 0
    index.evict(100)
    index.check_integrity()


def test_the_bookkeeping_of_uses_does_not_grow() -> None:
    pool = SlotPool(20)
    index = PrefixIndex(pool)
    kept(index, pool, [1, 2, 3])
    for _ in range(1000):
        assert found(index, [1, 2, 3]) == 3
    assert len(index._leaves) < 100
    index.check_integrity()


def test_keeping_and_dropping_what_one_must_not_is_a_fault() -> None:
    pool = SlotPool(8)
    slots = pool.allocate(2)
    pool.keep(slots)
    with pytest.raises(AssertionError, match="kept twice"):
        pool.keep(slots)
    pool.release(slots)
    assert pool.num_idle == 2
    with pytest.raises(AssertionError, match="does not own it"):
        pool.release(slots)
    pool = SlotPool(8)
    with pytest.raises(AssertionError, match="not kept"):
        pool.drop(pool.allocate(1))
    with pytest.raises(AssertionError, match="free slot"):
        pool.keep(np.array([5], np.int32))
