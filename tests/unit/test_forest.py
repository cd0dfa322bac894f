"""All trees of a step in flat arrays: what they say of nodes is what ``Tree`` says of each by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.engine.trees import Forest, forest_of
from eagle2.speculative.tree import Tree
from eagle2.transport.messages import DraftStatus, DraftTree

VOCAB = 258
Sizes = Sequence[tuple[int, int]]
sizes_of_trees = st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 25)), min_size=1, max_size=5)


def a_reply(seed: int, drafted: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(0, i + 1)) for i in range(drafted)]
    scores = [0.0]
    for parent in parents:
        scores.append(scores[parent] - float(rng.exponential()))
    tokens = torch.from_numpy(rng.integers(0, VOCAB, drafted))
    return DraftTree(1, 1, DraftStatus.OK, 0, tokens, torch.tensor(parents).long(), torch.tensor(scores[1:]))


def tree_of(root: int, reply: DraftTree) -> Tree:
    """The tree (B = 1) of a reply, put together node by node."""
    return Tree(
        torch.tensor([[root, *reply.tokens.tolist()]]),
        torch.tensor([[-1, *reply.parents.tolist()]]),
        torch.tensor([[0.0, *reply.scores.tolist()]], dtype=torch.float32),
        torch.tensor([1 + len(reply.tokens)]),
    )


def a_forest(sizes: Sizes) -> tuple[Forest, list[Tree]]:
    replies = [a_reply(seed, drafted) for seed, drafted in sizes]
    forest, num_wrong = forest_of(range(len(replies)), replies, VOCAB)
    assert num_wrong == 0
    return forest, [tree_of(root, reply) for root, reply in enumerate(replies)]


def assert_same(one: Tree, other: Tree) -> None:
    for field in fields(Tree):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


def texts(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[0, [n for n in path if n >= 0]].tolist()) for path in tree.paths()[0].tolist()}


@settings(deadline=None)
@given(sizes_of_trees)
def test_a_forest_is_its_trees(sizes: Sizes) -> None:
    forest, trees = a_forest(sizes)
    parts = forest.split()
    forest.padded().check()
    slots = np.arange(1000, 1000 + forest.num_nodes, dtype=np.int32)
    paths, begin = forest.paths(slots), 0
    for part, tree in zip(parts, trees, strict=True):
        mine = slice(begin, begin := begin + tree.num_nodes)
        assert_same(part.padded(), tree)
        assert forest.depths[mine].tolist() == tree.depths()[0].tolist()
        for path, nodes in zip(paths[mine].tolist(), tree.paths()[0].tolist(), strict=True):
            assert [slot for slot in path if slot >= 0] == [int(slots[mine][node]) for node in nodes if node >= 0]
        assert_same(part.roots().padded(), Tree.of_roots(tree.tokens[:, 0]))
    joined = Forest.joined(parts)
    assert_same(joined.padded(), forest.padded())
    assert joined.starts.tolist() == [0, *np.cumsum(forest.sizes)[:-1].tolist()]


@settings(deadline=None)
@given(sizes_of_trees, st.floats(0, 1))
def test_cutting_nodes_leaves_trees(sizes: Sizes, share: float) -> None:
    forest, trees = a_forest(sizes)
    nodes = forest.drafted()
    assert len(nodes.scores) == sum(drafted for _, drafted in sizes)
    assert nodes.trees.tolist() == [place for place, (_, drafted) in enumerate(sizes) for _ in range(drafted)]
    for i, parent in enumerate(nodes.parents.tolist()):
        assert nodes.depths[i] == (1 if parent < 0 else nodes.depths[parent] + 1)
        assert parent < i
        assert parent < 0 or nodes.trees[parent] == nodes.trees[i]
    order = np.argsort(-nodes.scores, kind="stable")
    kept = np.zeros(len(order), np.bool_)
    kept[order[: int(share * len(order))]] = True
    cut = forest.with_nodes(kept)
    assert cut.num_nodes == len(trees) + kept.sum()
    assert cut.num_nodes < forest.num_nodes or cut is forest
    for place, (part, tree) in enumerate(zip(cut.split(), trees, strict=True)):
        part.padded().check()
        assert part.num_nodes == 1 + kept[nodes.trees == place].sum()
        assert part.depths.tolist() == part.padded().depths()[0].tolist()
        assert texts(part.padded()) <= texts(tree)


WRONG: dict[str, Callable[[DraftTree], DraftTree]] = {
    "a token beyond the vocabulary": lambda t: replace(t, tokens=t.tokens + VOCAB),
    "a negative token": lambda t: replace(t, tokens=t.tokens - VOCAB),
    "a node that is its own parent": lambda t: replace(t, parents=torch.arange(1, 1 + len(t.parents))),
    "a root among the nodes": lambda t: replace(t, parents=torch.full_like(t.parents, -1)),
    "a score above its parent's": lambda t: replace(t, scores=t.scores + 100.0),
    "scores that are no numbers": lambda t: replace(t, scores=t.scores * float("nan")),
    "fewer parents than tokens": lambda t: replace(t, parents=t.parents[:-1]),
    "fewer scores than tokens": lambda t: replace(t, scores=t.scores[:-1]),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_tree_is_its_root_and_the_others_stay(name: str, place: int) -> None:
    replies: list[DraftTree | None] = [a_reply(seed, 4 + seed) for seed in range(3)]
    other = replies[place - 1]
    assert other is not None
    spoilt = replies[place]
    assert spoilt is not None
    forest, num_wrong = forest_of([7, 8, 9], [*replies[:place], WRONG[name](spoilt), *replies[place + 1 :]], VOCAB)
    assert num_wrong == 1
    parts = forest.split()
    assert_same(parts[place].padded(), Tree.of_roots(torch.tensor([7 + place])))
    assert_same(parts[place - 1].padded(), tree_of([7, 8, 9][place - 1], other))


def test_whoever_has_no_reply_has_its_root() -> None:
    reply = a_reply(1, 5)
    forest, num_wrong = forest_of([4, 5, 6], [None, reply, a_reply(2, 0)], VOCAB)
    assert num_wrong == 0
    assert list(forest.sizes) == [1, 6, 1]
    assert_same(forest.split()[1].padded(), tree_of(5, reply))
    alone, num_wrong = forest_of([4, 5], [None, None], VOCAB)
    assert num_wrong == 0
    assert_same(alone.padded(), Tree.of_roots(torch.tensor([4, 5])))
