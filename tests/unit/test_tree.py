"""Trees: what derives from the parents against naive Python, pruning, and what is no tree."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.speculative.tree import NO_NODE, Tree


@st.composite
def trees(draw: st.DrawFn, max_batch: int = 4, max_nodes: int = 14) -> Tree:
    """Batches of trees of different sizes; steps of the scores are from a few values, so that ties are common."""
    batch, width = draw(st.integers(1, max_batch)), draw(st.integers(1, max_nodes))
    sizes = [draw(st.integers(1, width)) for _ in range(batch)]
    tokens, parents, scores = [], [], []
    for size in sizes:
        above = [NO_NODE, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
        score = [0.0]
        for node in range(1, size):
            score.append(score[above[node]] - draw(st.sampled_from([0.0, 0.5, 1.0, float("inf")])))
        padding = width - size
        tokens.append([draw(st.integers(0, 50)) for _ in range(size)] + [0] * padding)
        parents.append(above + [NO_NODE] * padding)
        scores.append(score + [-torch.inf] * padding)
    return Tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(scores), torch.tensor(sizes))


def path_of(tree: Tree, b: int, node: int) -> list[int]:
    path = [node]
    while (parent := int(tree.parents[b, path[0]])) >= 0:
        path.insert(0, parent)
    return path


@settings(deadline=None)
@given(trees())
def test_depths_paths_and_mask_derive_from_the_parents(tree: Tree) -> None:
    tree.check()
    depths, paths, mask, is_node = tree.depths(), tree.paths(), tree.ancestors(), tree.is_node()
    deepest = 0
    for b in range(len(tree.sizes)):
        for node in range(tree.num_nodes):
            valid = node < int(tree.sizes[b])
            path = path_of(tree, b, node) if valid else []
            deepest = max(deepest, len(path))
            assert bool(is_node[b, node]) == valid
            assert int(depths[b, node]) == max(0, len(path) - 1)
            row = paths[b, node].tolist()
            assert row == path + [NO_NODE] * (len(row) - len(path))
            assert mask[b, node].nonzero().flatten().tolist() == path
    assert paths.shape == (len(tree.sizes), tree.num_nodes, deepest)


@settings(deadline=None)
@given(trees(), st.integers(1, 15))
def test_pruning_keeps_the_best_and_a_tree(tree: Tree, num_nodes: int) -> None:
    small = tree.pruned(num_nodes)
    small.check()
    assert small.num_nodes == min(num_nodes, tree.num_nodes)
    for b, size in enumerate(tree.sizes.tolist()):
        drafted = sorted(range(1, size), key=lambda node: (-float(tree.scores[b, node]), node))
        kept = [0, *sorted(drafted[: num_nodes - 1])]
        assert int(small.sizes[b]) == len(kept)
        assert small.tokens[b, : len(kept)].tolist() == tree.tokens[b, kept].tolist()
        assert small.scores[b, : len(kept)].tolist() == tree.scores[b, kept].tolist()
        # The same parents under their new numbers.
        above = [kept.index(int(p)) if p >= 0 else NO_NODE for p in tree.parents[b, kept]]
        assert small.parents[b].tolist() == above + [NO_NODE] * (small.num_nodes - len(kept))


@settings(deadline=None)
@given(trees())
def test_each_tree_of_a_batch_is_the_tree_alone(tree: Tree) -> None:
    for b in range(len(tree.sizes)):
        alone = Tree(*(getattr(tree, field.name)[b : b + 1] for field in dataclasses.fields(tree)))
        alone.check()
        assert torch.equal(alone.ancestors()[0], tree.ancestors()[b])
        assert torch.equal(alone.depths()[0], tree.depths()[b])
        pruned, together = alone.pruned(3), tree.pruned(3)
        for field in dataclasses.fields(tree):
            assert torch.equal(getattr(pruned, field.name)[0], getattr(together, field.name)[b])


def test_a_tree_of_the_root_alone() -> None:
    tree = Tree.of_roots(torch.tensor([7, 9]))
    tree.check()
    assert tree.tokens.tolist() == [[7], [9]]
    assert tree.paths().tolist() == [[[0]], [[0]]]
    assert tree.ancestors().all()
    assert tree.depths().tolist() == [[0], [0]]
    assert tree.pruned(1) is tree


def small_tree() -> Tree:
    """Root with children 1 and 2, node 3 below 1, one place of padding; the second tree is full."""
    return Tree(
        tokens=torch.tensor([[5, 1, 2, 3, 0], [5, 1, 2, 3, 4]]),
        parents=torch.tensor([[-1, 0, 0, 1, -1], [-1, 0, 1, 2, 3]]),
        scores=torch.tensor([[0.0, -1.0, -1.5, -2.0, -torch.inf], [0.0, -1.0, -2.0, -3.0, -4.0]]),
        sizes=torch.tensor([4, 5]),
    )


BROKEN = {
    "root has a parent": ("parents", (0, 0), 0, "root"),
    "root is its own child's child": ("parents", (1, 0), 2, "root"),
    "no node at all": ("sizes", (0,), 0, r"1 to 5 nodes, got sizes \[0, 5\]"),
    "negative size": ("sizes", (1,), -1, "nodes, got sizes"),
    "more nodes than there are": ("sizes", (1,), 6, r"got sizes \[4, 6\]"),
    "node without a parent": ("parents", (0, 2), -1, "comes before it"),
    "node is its own parent": ("parents", (0, 3), 3, "comes before it"),
    "parent stands behind": ("parents", (1, 2), 4, "comes before it"),
    "parent is below -1": ("parents", (0, 1), -7, "comes before it"),
    "parent does not exist": ("parents", (0, 1), 99, "comes before it"),
    "padding hangs on the tree": ("parents", (0, 4), 1, "padding"),
    "padding hangs on nothing": ("parents", (0, 4), 99, "padding"),
    "score rises": ("scores", (0, 3), -0.5, "score"),
    "score rises above the root's": ("scores", (1, 1), 0.25, "score"),
    "score is no number": ("scores", (0, 2), float("nan"), "score"),
    "root's score is no number": ("scores", (0, 0), float("nan"), "score"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_no_tree_is_refused(fault: str) -> None:
    small_tree().check()
    name, place, value, sentence = BROKEN[fault]
    tree = small_tree()
    getattr(tree, name)[place] = value
    with pytest.raises(ValueError, match=sentence):
        tree.check()
