"""Acceptance against a naive walk, for any tree and any target."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle2.speculative.accept import accept, greedy
from eagle2.speculative.tree import NO_NODE, Tree

VOCAB = 4


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Few tokens, so that paths are taken and siblings carry the same token at times; padding has token 0."""
    batch, width = draw(st.integers(1, 5)), draw(st.integers(1, 16))
    sizes = [draw(st.integers(1, width)) for _ in range(batch)]
    parents = [
        [NO_NODE, *(draw(st.integers(0, n - 1)) for n in range(1, size)), *[NO_NODE] * (width - size)] for size in sizes
    ]
    tokens = [[*(draw(st.integers(0, VOCAB - 1)) for _ in range(s)), *[0] * (width - s)] for s in sizes]
    scores = torch.where(torch.arange(width) < torch.tensor(sizes)[:, None], 0.0, -torch.inf)
    return Tree(torch.tensor(tokens), torch.tensor(parents), scores, torch.tensor(sizes))


def walk(tree: Tree, b: int, picks: list[int]) -> tuple[list[int], int]:
    """One sequence, node by node: the path and the token after it."""
    path = [0]
    while True:
        token = picks[path[-1]]
        children = [n for n in range(1, int(tree.sizes[b])) if int(tree.parents[b, n]) == path[-1]]
        carrying = [n for n in children if int(tree.tokens[b, n]) == token]
        if not carrying:
            return path, token
        path.append(carrying[0])


@settings(deadline=None)
@given(trees(), st.integers(0, 2**32))
def test_the_walk_of_each_sequence_is_the_naive_one(tree: Tree, seed: int) -> None:
    tree.check()
    generator = random.Random(seed)
    picks = [[generator.randrange(VOCAB) for _ in range(tree.num_nodes)] for _ in tree.sizes]
    done = accept(tree, greedy(torch.tensor(picks)))
    longest = 0
    for b, size in enumerate(tree.sizes.tolist()):
        path, bonus = walk(tree, b, picks[b])
        longest = max(longest, len(path))
        row = done.path[b].tolist()
        assert row == path + [NO_NODE] * (len(row) - len(path))
        assert int(done.counts[b]) == len(path) - 1
        assert int(done.bonus[b]) == bonus
        assert done.committed_tokens(tree, b) == [*(int(tree.tokens[b, n]) for n in path[1:]), bonus]
        assert all(0 <= node < size for node in path)
    assert done.path.shape == (len(tree.sizes), longest)


@settings(deadline=None)
@given(trees())
def test_padding_is_never_accepted(tree: Tree) -> None:
    """A target that always picks padding's token 0."""
    done = accept(tree, greedy(torch.zeros_like(tree.tokens)))
    assert (done.path < tree.sizes.unsqueeze(1)).all()
    assert (done.bonus == 0).all()


@settings(deadline=None)
@given(trees(), st.integers(0, 2**32))
def test_the_target_is_asked_once_a_level_and_only_on_the_path(tree: Tree, seed: int) -> None:
    generator = random.Random(seed)
    picks = torch.tensor([[generator.randrange(VOCAB) for _ in range(tree.num_nodes)] for _ in tree.sizes])
    asked: list[tuple[list[int], list[int]]] = []

    def choose(sequences: Tensor, nodes: Tensor) -> Tensor:
        asked.append((sequences.tolist(), nodes.tolist()))
        return picks[sequences, nodes]

    done = accept(tree, choose)
    assert len(asked) == done.path.shape[1]
    for level, (sequences, nodes) in enumerate(asked):
        walking = (done.counts >= level).nonzero().flatten()
        assert sequences == walking.tolist()
        assert nodes == done.path[walking, level].tolist()


def test_a_root_alone_commits_the_targets_token() -> None:
    tree = Tree.of_roots(torch.tensor([3, 1]))
    done = accept(tree, greedy(torch.tensor([[2], [0]])))
    assert done.path.tolist() == [[0], [0]]
    assert done.counts.tolist() == [0, 0]
    assert [done.committed_tokens(tree, b) for b in range(2)] == [[2], [0]]
