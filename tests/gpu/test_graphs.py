"""Recorded steps on the device: the same results as launch by launch, and nothing that waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from benchmarks.gpu_cycle import TINY, models
from benchmarks.gpu_pair import DevicePair, limits_for
from eagle2.engine.batch import RowsBuilder
from eagle2.models.rows import Rows
from eagle2.transport.messages import DraftEntry, DraftStep

pytestmark = pytest.mark.gpu

LENGTH, BATCH = 70, 3


def pair_on(device: torch.device, dtype: torch.dtype, *, recorded: bool) -> DevicePair:
    target, head = models(TINY, dtype, device)
    limits = limits_for(TINY.shape, BATCH + 1, 300) if recorded else None
    pair = DevicePair(target, head, 1000, limits)
    torch.manual_seed(0)
    pair.start_with_noise(BATCH, LENGTH, TINY.vocab)
    pair.hold(4)
    return pair


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recorded_cycles_do_what_launched_ones_do(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cpu" and dtype != torch.float32:
        pytest.skip("the CPU has tests of its own")
    recorded, launched = pair_on(device, dtype, recorded=True), pair_on(device, dtype, recorded=False)
    for _ in range(3):
        ours, theirs = recorded.cycle(TINY.shape), launched.cycle(TINY.shape)
        if dtype == torch.float32:
            # Products of matrices may sum in another order for another number of rows, trees may differ by ties then.
            torch.testing.assert_close(ours.tree.scores, theirs.tree.scores, atol=1e-4, rtol=1e-4)
        assert torch.equal(ours.tree.sizes, theirs.tree.sizes)
    for pair in (recorded, launched):
        pair.check_integrity()


def test_a_verify_step_waits_only_for_its_result(gpu: torch.device) -> None:
    pair = pair_on(gpu, torch.bfloat16, recorded=True)
    pair.cycle(TINY.shape, commit=False)  # records
    builder_rows = _rows(pair)
    pair.target.forward(builder_rows)
    with no_waiting():
        logits = pair.target.logits(pair.target.forward(builder_rows))
        best = logits.max(dim=1)
        kept = torch.where(best.values.isfinite(), best.indices, -1)
    assert len(kept.tolist()) == len(builder_rows)


def test_a_recorded_expansion_waits_for_nothing(gpu: torch.device) -> None:
    pair = pair_on(gpu, torch.bfloat16, recorded=True)
    pair.cycle(TINY.shape, commit=False)
    expansion = pair.drafts._expansion
    assert expansion is not None
    recorded = next(iter(expansion._recorded.values()))
    assert recorded._recording is not None
    with no_waiting():
        packed = recorded._recording.replay()
    assert packed.shape[0] == 3


def test_a_draft_step_waits_once(gpu: torch.device) -> None:
    """All that a proposer does between a message and its reply: one transfer brings the trees."""
    pair = pair_on(gpu, torch.bfloat16, recorded=True)
    pair.cycle(TINY.shape, commit=False)
    features, tokens = torch.randn(4, TINY.hidden, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int64)
    entries = tuple(DraftEntry(sequence, 9, LENGTH - 4, features, tokens) for sequence in range(BATCH))
    shape = TINY.shape
    step = DraftStep(1, 9, shape.depth, shape.top_k, shape.num_nodes - 1, entries=entries)
    torch.cuda.synchronize()
    with _counted_waits() as waits:
        pair.drafts.handle(step)
    assert len(waits) == 1, waits


@contextmanager
def _counted_waits() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]


def _rows(pair: DevicePair) -> Rows:
    builder = RowsBuilder()
    for table, tokens in zip(pair.tables, pair.tokens, strict=True):
        own = pair.target.pool.allocate(2)
        builder.add_nodes(table.slots, tokens[-2:], np.array([0, 1]), np.array([[own[0], -1], own], np.int32))
        pair.target.pool.release(own)
    return builder.build()
