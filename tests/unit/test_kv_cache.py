"""Slots: a state machine against plain lists, and a cache that equals a fresh prefill whatever happened before."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from eagle2.kv_cache.slots import OutOfSlotsError, SlotPool, SlotTable
from eagle2.models.checkpoint import TargetConfig, load_tensors
from eagle2.models.linear import packs
from eagle2.models.target import TargetModel
from eagle2.models.tiny import TOKENIZER_SIZE, write_tiny_target
from tests.pooled import Nodes, Pooled, Span


class SlotMachine(RuleBasedStateMachine):
    """Every table beside a list of what it should hold; trees of slots that are not committed yet beside both."""

    tables = Bundle("tables")

    @initialize(num_slots=st.integers(1, 150))
    def start(self, num_slots: int) -> None:
        self.pool = SlotPool(num_slots)
        self.held: dict[SlotTable, list[int]] = {}

    def free(self) -> int:
        return self.pool.num_slots - len({slot for slots in self.held.values() for slot in slots})

    @rule(target=tables)
    def new(self) -> SlotTable:
        table = SlotTable(self.pool)
        self.held[table] = []
        return table

    @rule(table=tables, count=st.integers(0, 80))
    def extend(self, table: SlotTable, count: int) -> None:
        taken = {slot for slots in self.held.values() for slot in slots}
        if count > self.free():
            with pytest.raises(OutOfSlotsError, match=rf"^{count} slots .* {self.free()} of {self.pool.num_slots}"):
                table.extend(count)
            return
        fresh = table.extend(count).tolist()
        assert len(set(fresh)) == count
        assert not taken & set(fresh)
        self.held[table] += fresh

    @rule(source=tables, table=tables, data=st.data())
    def share(self, source: SlotTable, table: SlotTable, data: st.DataObject) -> None:
        if source is table:
            return
        count = data.draw(st.integers(0, len(source)))
        table.share(source.slots[:count].copy())
        self.held[table] += self.held[source][:count]

    @rule(table=tables, size=st.integers(1, 30), data=st.data())
    def commit(self, table: SlotTable, size: int, data: st.DataObject) -> None:
        if size > self.free():
            with pytest.raises(OutOfSlotsError):
                self.pool.allocate(size)
            return
        nodes = self.pool.allocate(size)
        path = sorted(data.draw(st.sets(st.integers(0, size - 1))))
        self.pool.check_integrity([nodes, *self.held.values()])
        table.commit(nodes, path)
        self.held[table] += nodes[path].tolist()

    @rule(table=tables, data=st.data())
    def truncate(self, table: SlotTable, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(table)))
        table.truncate(length)
        del self.held[table][length:]

    @rule(table=consumes(tables))
    def end(self, table: SlotTable) -> None:
        table.free()
        del self.held[table]

    @invariant()
    def all_is_explained(self) -> None:
        if not hasattr(self, "pool"):
            return
        for table, slots in self.held.items():
            assert table.slots.tolist() == slots
            assert len(table) == len(slots)
        self.pool.check_integrity(table.slots for table in self.held)
        assert self.pool.num_free == self.free()
        assert self.pool.num_free + self.pool.num_used == self.pool.num_slots

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.held:
                table.free()
            assert self.pool.num_free == self.pool.num_slots


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlotMachine = SlotMachine.TestCase


def test_a_pool_needs_a_slot() -> None:
    with pytest.raises(ValueError, match=r"at least one slot, got 0"):
        SlotPool(0)


def test_a_failed_allocation_changes_nothing() -> None:
    pool = SlotPool(8)
    table = SlotTable(pool)
    table.extend(5)
    before = table.slots.tolist()
    with pytest.raises(OutOfSlotsError, match=r"4 slots were asked for, 3 of 8 are free"):
        table.extend(4)
    assert table.slots.tolist() == before
    pool.check_integrity([table.slots])
    assert sorted([*before, *table.extend(3).tolist()]) == list(range(8))


def test_what_is_lost_or_owned_twice_is_found() -> None:
    pool = SlotPool(8)
    table = SlotTable(pool)
    table.extend(3)
    with pytest.raises(AssertionError, match=r"slot 0 has 1 references but 0 owners"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match=r"slot 0 has 1 references but 2 owners"):
        pool.check_integrity([table.slots, table.slots])
    lost = pool.allocate(1)
    with pytest.raises(AssertionError, match=rf"slot {lost[0]} has 1 references but 0 owners"):
        pool.check_integrity([table.slots])


def test_releasing_and_sharing_what_is_free_is_a_fault() -> None:
    pool = SlotPool(4)
    slots = pool.allocate(2)
    pool.release(slots)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(slots)
    pool = SlotPool(4)
    with pytest.raises(AssertionError, match="free slot"):
        SlotTable(pool).share(np.array([1], np.int32))
    with pytest.raises(AssertionError, match="cannot truncate 0 positions to 1"):
        SlotTable(pool).truncate(1)


@functools.cache
def tiny_model(dtype: torch.dtype) -> TargetModel:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_target(Path(folder), hidden_size=32, intermediate_size=48, head_dim=8, tokenizer=False)
        return TargetModel(TargetConfig.from_folder(path), load_tensors(path), dtype=dtype)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["append", "tree", "tree", "truncate", "free", "share"]), st.integers(0, 2**31)),
    min_size=4,
    max_size=14,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions=ACTIONS)
def test_the_cache_equals_a_fresh_prefill(dtype: torch.dtype, actions: list[tuple[str, int]]) -> None:
    """To the bit, after any appends, committed tree paths, truncations, frees and shared prefixes."""
    if not packs(torch.empty(2, 2, dtype=dtype)):
        pytest.skip(f"this CPU has no instructions for {dtype}")
    model = tiny_model(dtype)
    pooled = Pooled(model, num_slots=1024, seed=len(actions))
    tables = [pooled.table() for _ in range(3)]
    texts: list[list[int]] = [[], [], []]
    for kind, seed in actions:
        generator = np.random.default_rng(seed)
        b, other = (int(i) for i in generator.permutation(3)[:2])
        table, text = tables[b], texts[b]

        def draw(count: int, generator: np.random.Generator = generator) -> list[int]:
            return generator.integers(0, TOKENIZER_SIZE, count).tolist()

        if kind == "append":
            fresh = draw(int(generator.choice([1, 3, 30, 64])))
            beside = draw(2)
            pooled.forward(Span(table, fresh), Span(tables[other], beside))
            text += fresh
            texts[other] += beside
        elif kind == "tree":
            # Both at once, as the verifier does it.
            trees = []
            for i in (b, other):
                size = int(generator.integers(1, 14))
                parents = [-1, *(int(generator.integers(0, node)) for node in range(1, size))]
                trees.append(Nodes(tables[i], draw(size), parents))
            pooled.forward(*trees)
            for i, tree in zip((b, other), trees, strict=True):
                path = tree.path(int(generator.integers(0, len(tree.tokens))))
                tables[i].commit(tree.slots, path)
                texts[i] += [tree.tokens[node] for node in path]
        elif kind == "truncate":
            length = int(generator.integers(0, len(text) + 1))
            table.truncate(length)
            del text[length:]
        elif kind == "free":
            table.free()
            text.clear()
        elif not text:
            length = int(generator.integers(0, len(texts[other]) + 1))
            table.share(tables[other].slots[:length].copy())
            text += texts[other][:length]
        pooled.pool.check_integrity(t.slots for t in tables)

    fresh_pool = Pooled(model, num_slots=1024, seed=1)
    fresh_tables = fresh_pool.start(*texts)
    for table, expected in zip(tables, fresh_tables, strict=True):
        assert len(table) == len(expected)
        for kept, right in ((pooled.kv.keys, fresh_pool.kv.keys), (pooled.kv.values, fresh_pool.kv.values)):
            assert torch.equal(kept[:, table.slots], right[:, expected.slots])
    for table in tables:
        table.free()
    assert pooled.pool.num_free == pooled.pool.num_slots
