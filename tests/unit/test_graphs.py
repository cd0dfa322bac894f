"""Recorded forwards and expansions, run anew on a CPU where they would be replayed: the same bits as without them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle2.engine.batch import RowsBuilder
from eagle2.engine.draft import DraftRunner
from eagle2.engine.graphs import ForwardGraphs, GraphLimits, Places, row_buckets
from eagle2.engine.target import TargetRunner
from eagle2.models.rows import Rows
from eagle2.speculative.draft import draft_trees
from eagle2.transport.messages import DraftEntry, DraftStatus, DraftStep
from golden_pair import load_head, load_target

LIMITS = GraphLimits(max_rows=48, max_sequences=4, max_context=200, max_path=6)
CPU = torch.device("cpu")


def test_buckets_cover_all_row_counts_with_little_padding() -> None:
    for most in (1, 2, 7, 60, 512, 976):
        buckets = row_buckets(most)
        assert buckets[-1] == most
        assert list(buckets) == sorted(set(buckets))
        for rows in range(1, most + 1):
            taken = next(bucket for bucket in buckets if bucket >= rows)
            assert taken <= max(16, 1.5 * rows)


def test_places_do_not_overlap_and_are_aligned() -> None:
    places = Places()
    shapes = {"a": (3,), "b": (2, 5), "c": (1,), "d": (4, 4)}
    for name, shape in shapes.items():
        places.add(name, *shape)
    numbers = torch.zeros(places.end, dtype=torch.int32)
    for value, (name, shape) in enumerate(shapes.items(), start=1):
        part = places.of_tensor(name, numbers)
        assert part.shape == shape
        assert part.storage_offset() % 4 == 0
        part += value
    assert sorted(set(numbers.tolist())) == [0, 1, 2, 3, 4]
    for name, shape in shapes.items():
        assert places.of_array(name, numbers.numpy()).shape == shape


class Sequences:
    """The same sequences in a runner with recordings and in one without."""

    def __init__(self) -> None:
        model = load_target("A")
        self.recorded = TargetRunner(model, 400, graphs=LIMITS)
        self.plain = TargetRunner(model, 400)
        for runner in (self.recorded, self.plain):
            runner._kv.keys.fill_(7.0)
            runner._kv.values.fill_(7.0)
            runner._features.fill_(7.0)

    def step(self, *parts: tuple[int, int]) -> Tensor:
        """A span of (first, count) tokens for each sequence b, whose position p has the slot 100 b + p."""
        builder = RowsBuilder()
        for b, (first, count) in enumerate(parts):
            table = np.arange(100 * b, 100 * b + first + count, dtype=np.int32)
            builder.add_span(table, first, [(7 * b + p) % 250 for p in range(first, first + count)])
        rows = builder.build()
        out = self.recorded.forward(rows)
        expected = self.plain.forward(rows)
        assert torch.equal(out, expected)
        # But for the last slot, which nobody has here: the CPU's kernels may take -1, a padding row's slot, for it.
        for name in ("keys", "values"):
            ours, theirs = getattr(self.recorded._kv, name), getattr(self.plain._kv, name)
            assert torch.equal(ours[:, :-1], theirs[:, :-1])
        assert torch.equal(self.recorded._features[:-1], self.plain._features[:-1])
        return out.clone()


def test_a_recorded_forward_gives_the_bits_of_a_plain_one() -> None:
    """Fewer rows after more, fewer sequences after more, contexts that grow: nothing is left of the step before."""
    sequences = Sequences()
    sequences.step((0, 20), (0, 9), (0, 1))
    sequences.step((20, 1), (9, 1))
    sequences.step((21, 5))
    sequences.step((26, 3), (10, 4), (1, 30), (0, 11))
    sequences.step((29, 1), (14, 1), (31, 1), (11, 1))


def test_what_is_beyond_the_limits_runs_without_a_recording() -> None:
    sequences = Sequences()
    graphs = sequences.recorded._graphs
    assert graphs is not None
    sequences.step((0, 49))
    assert not graphs._recordings
    sequences.step((49, 48))
    assert list(graphs._recordings) == [48]


def test_all_recordings_can_be_made_ahead() -> None:
    sequences = Sequences()
    graphs = sequences.recorded._graphs
    assert graphs is not None
    graphs.record_all()
    made = dict(graphs._recordings)
    assert tuple(made) == graphs.buckets
    sequences.step((0, 3), (0, 40))
    assert graphs._recordings == made


def test_rows_that_are_recorded_see_only_memory_that_stays() -> None:
    """A replayed graph reads where its recording read: the function gets the same tensors each time."""
    seen: list[list[int]] = []

    def forward(rows: Rows, features: Tensor | None) -> Tensor:
        assert features is not None
        seen.append([rows.slots.data_ptr(), rows.tables.data_ptr(), rows.paths.data_ptr(), features.data_ptr()])
        return features * 2

    graphs = ForwardGraphs(forward, CPU, LIMITS, features=(3, torch.float32))
    for count in (3, 4):
        builder = RowsBuilder()
        builder.add_span(np.arange(count, dtype=np.int32), 0, [1] * count)
        features = torch.rand(count, 3)
        assert torch.equal(graphs.run(builder.build(), features), features * 2)
    assert seen[0] == seen[1]


def test_logits_of_some_rows_and_the_best_of_each() -> None:
    runner = TargetRunner(load_target("A"), 100, vocab_size=258)
    features = torch.randn(6, 64)
    logits = torch.empty(2, 320).copy_(runner.logits(features, [1, 4]))
    assert torch.equal(logits, runner.logits(features[[1, 4]]))
    assert torch.equal(runner.best(logits), logits.argmax(1))
    logits[1, 3] = torch.nan
    assert runner.best(logits).tolist() == [int(logits[0].argmax()), -1]
    logits[0] = -torch.inf
    assert runner.best(logits).tolist() == [-1, -1]


class Heads:
    """The same head with recordings and without."""

    def __init__(self, token_ids: Tensor | None = None) -> None:
        target = load_target("A")
        head = load_head("A", target, token_ids=token_ids)
        limits = GraphLimits(max_rows=40, max_sequences=4, max_context=100, max_path=8)
        self.recorded = DraftRunner(head, 600, incarnation=1, vocab_size=258, graphs=limits)
        # Step by step, not by the CPU's kernel of whole drafts: its sums are in another order, and tested apart.
        self.plain = DraftRunner(head, 600, incarnation=1, vocab_size=258, policy=partial(draft_trees))
        self._random = torch.Generator().manual_seed(0)

    def step(
        self, *asked: tuple[int, int, int], depth: int = 3, nodes: int = 12, broken: int = -1
    ) -> list[DraftStatus]:
        """Entries (sequence, base, rows); 0 rows: only synced. Both runners answer alike."""
        entries = []
        for sequence, base, rows in asked:
            features = torch.randn(abs(rows), 64, generator=self._random)
            if sequence == broken:
                features *= 1e38
            tokens = torch.randint(0, 250, (abs(rows),), generator=self._random)
            entries.append(DraftEntry(sequence, 1, base, features, tokens, draft=rows > 0))
        step = DraftStep(incarnation=2, step=3, depth=depth, top_k=4, num_draft_tokens=nodes, entries=tuple(entries))
        replies = [runner.handle(step).trees for runner in (self.recorded, self.plain)]
        for ours, theirs in zip(*replies, strict=True):
            assert (ours.sequence, ours.status, ours.held) == (theirs.sequence, theirs.status, theirs.held)
            assert torch.equal(ours.tokens, theirs.tokens)
            assert torch.equal(ours.parents, theirs.parents)
            assert torch.equal(ours.scores, theirs.scores)
        for runner in (self.recorded, self.plain):
            runner.check_integrity()
        return [tree.status for tree in replies[0]]


@pytest.mark.parametrize("subset", [False, True], ids=["all", "subset"])
def test_trees_that_grow_on_the_device_are_those_of_the_host(subset: bool) -> None:
    """Batches of 1, 3 and 4 (3 is padded to 4), several shapes, syncing beside drafting, more rows than recorded."""
    heads = Heads(torch.arange(0, 250, 3) if subset else None)
    heads.recorded.warm_up()
    assert heads.step((1, 0, 9)) == [DraftStatus.OK]
    heads.step((1, 9, 2), (2, 0, 5), (3, 0, 1))
    heads.step((3, 1, 1), (1, 11, 3), (2, 5, 4), (4, 0, 6), depth=5, nodes=30)
    assert heads.step((5, 0, -7), (1, 14, 1)) == [DraftStatus.SYNCED, DraftStatus.OK]
    heads.step((5, 7, 60), depth=2)
    heads.step((1, 15, 1), (2, 9, 1), (3, 2, 1), depth=1, nodes=4)
    heads.step((1, 15, 1), (2, 9, 1), depth=1, nodes=1)
    expansion = heads.recorded._expansion
    assert expansion is not None
    assert {batch for batch, _ in expansion._recorded} == {1, 2, 4}


def test_an_output_that_is_no_number_is_found_on_the_device_too() -> None:
    heads = Heads()
    heads.step((1, 0, 4), (2, 0, 4))
    found = heads.step((1, 4, 2), (2, 4, 2), (3, 0, 2), broken=2)
    assert found == [DraftStatus.OK, DraftStatus.NON_FINITE, DraftStatus.OK]
    assert heads.step((1, 6, 1), (2, 4, 1)) == [DraftStatus.OK, DraftStatus.OK]
