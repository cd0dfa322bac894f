"""Trees that grow in one kernel are those that ``draft_trees`` grows operator by operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle2.engine.draft import DraftRunner
from eagle2.models.linear import packs
from eagle2.speculative.draft import DraftNetwork, TreeShape, draft_trees
from eagle2.speculative.tree import Tree
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep
from fakes.engines import draft_head

DTYPES = [torch.float32, torch.bfloat16]


def by_operators(network: DraftNetwork, features: Tensor, logits: Tensor, roots: Tensor, shape: TreeShape) -> Tree:
    """Another policy than the one that serves, so it never runs in the kernel."""
    return draft_trees(network, features, logits, roots, shape)


def runner_of(dtype: torch.dtype) -> DraftRunner:
    if not packs(torch.empty(2, 2, dtype=dtype)):
        pytest.skip(f"this CPU has no instructions for {dtype}")
    runner = draft_head(dtype=dtype)
    if runner.model.grower is None:
        pytest.skip("this CPU grows trees operator by operator")
    return runner


def entry(sequence: int, rows: int, dtype: torch.dtype, *, draft: bool = True) -> DraftEntry:
    generator = torch.Generator().manual_seed(sequence)
    features = torch.randn(rows, 64, generator=generator).to(dtype)
    tokens = torch.randint(0, 256, (rows,), generator=generator)
    return DraftEntry(sequence, 0, 0, features, tokens, draft)


def ask(runner: DraftRunner, shape: TreeShape, *entries: DraftEntry) -> DraftReply:
    runner.reset()
    reply = runner.handle(DraftStep(1, 0, shape.depth, shape.top_k, shape.num_nodes - 1, entries))
    runner.check_integrity()
    return reply


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [TreeShape(1, 4, 5), TreeShape(3, 4, 11), TreeShape(5, 3, 90), TreeShape(6, 10, 60), TreeShape(2, 2, 1)]
)
def test_trees_are_those_of_draft_trees(dtype: torch.dtype, shape: TreeShape) -> None:
    kernel, operators = runner_of(dtype), runner_of(dtype)
    operators.policy = by_operators
    entries = [entry(1, 1, dtype), entry(2, 70, dtype, draft=False), entry(3, 64, dtype), entry(4, 5, dtype)]
    found, expected = ask(kernel, shape, *entries), ask(operators, shape, *entries)
    for one, other in zip(found.trees, expected.trees, strict=True):
        assert (one.status, one.held) == (other.status, other.held)
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.parents.tolist() == other.parents.tolist()
        torch.testing.assert_close(one.scores, other.scores, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tree_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    runner, shape = runner_of(dtype), TreeShape(4, 5, 30)
    entries = [entry(sequence, rows, dtype) for sequence, rows in enumerate((3, 1, 65, 20))]
    together = ask(runner, shape, *entries).trees
    for one, tree in zip(entries, together, strict=True):
        (alone,) = ask(runner, shape, one).trees
        assert torch.equal(alone.tokens, tree.tokens)
        assert torch.equal(alone.parents, tree.parents)
        assert torch.equal(alone.scores, tree.scores)


def test_an_output_that_is_no_number_spoils_only_its_own_tree() -> None:
    """Features near the end of float32: finite themselves, but their sums are not."""
    runner, shape = runner_of(torch.float32), TreeShape(3, 4, 11)
    sound, broken = entry(1, 4, torch.float32), entry(2, 4, torch.float32)
    broken.features.fill_(3e38)
    (expected,) = ask(runner, shape, sound).trees
    first, second = ask(runner, shape, sound, broken).trees
    assert (first.status, second.status) == (DraftStatus.OK, DraftStatus.NON_FINITE)
    assert torch.equal(first.tokens, expected.tokens)
    assert torch.equal(first.scores, expected.scores)
