"""Expansion and rerank against a plain reading of the method, one sequence and one path at a time."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle2.speculative.draft import TreeShape, best_children, draft_trees, expand, select
from eagle2.speculative.tree import Tree

HIDDEN = 3
Path = tuple[int, ...]


class PathNetwork:
    """A head whose output and logits after a path of tokens are drawn from a hash of (sequence, path).

    ``features`` must be the parent's output and ``ancestors`` the rows of the path, or it asserts. ``silent``: how
    many tokens of each row have probability 0.
    """

    def __init__(self, sequences: list[int], vocab: int, silent: int = 0, sharpness: float = 2.0) -> None:
        self.sequences, self.vocab, self.silent, self.sharpness = sequences, vocab, silent, sharpness
        self._rows: list[list[Path]] = [[] for _ in sequences]
        self.steps = 0

    def output(self, sequence: int, path: Path) -> Tensor:
        return torch.from_numpy(self._generator(sequence, path, 1).standard_normal(HIDDEN)).float()

    def logits(self, sequence: int, path: Path) -> Tensor:
        generator = self._generator(sequence, path, 2)
        logits = self.sharpness * torch.from_numpy(generator.standard_normal(self.vocab)).float()
        logits[torch.from_numpy(generator.permutation(self.vocab)[: self.silent])] = -torch.inf
        return logits

    def first(self) -> tuple[Tensor, Tensor]:
        return (
            torch.stack([self.output(s, ()) for s in self.sequences]),
            torch.stack([self.logits(s, ()) for s in self.sequences]),
        )

    def step(self, tokens: Tensor, features: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += 1
        outputs, logits = [], []
        for b, sequence in enumerate(self.sequences):
            paths = []
            for i, token in enumerate(tokens[b].tolist()):
                above: Path = ()
                for row in ancestors[b, i].tolist():
                    assert self._rows[b][row][:-1] == above, "ancestors are a path, oldest first"
                    above = self._rows[b][row]
                assert len(above) == self.steps - 1
                assert torch.equal(features[b, i], self.output(sequence, above)), "the parent's output"
                paths.append((*above, token))
            self._rows[b] += paths
            outputs.append(torch.stack([self.output(sequence, path) for path in paths]))
            logits.append(torch.stack([self.logits(sequence, path) for path in paths]))
        return torch.stack(outputs), torch.stack(logits)

    @staticmethod
    def _generator(sequence: int, path: Path, kind: int) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(repr((sequence, path, kind)).encode()))


Candidate = tuple[Path, np.float32]


def naive(network: PathNetwork, sequence: int, shape: TreeShape) -> tuple[list[Candidate], list[Candidate]]:
    """All candidates in flat order and those that the rerank keeps, as EAGLE-2 (section 4) says it.

    A K above the vocabulary counts as the vocabulary.
    """
    top_k = min(shape.top_k, network.vocab)

    def children(path: Path, score: np.float32) -> list[Candidate]:
        logits = network.logits(sequence, path)
        log_probs = (logits - logits.logsumexp(0)).numpy()
        ranked = sorted(range(network.vocab), key=lambda token: -log_probs[token])
        return [((*path, token), score + log_probs[token]) for token in ranked[:top_k]]

    levels = [children((), np.float32(0))]
    for _ in range(1, shape.depth):
        last = levels[-1]
        order = sorted(range(len(last)), key=lambda i: (-last[i][1], i))
        levels.append([child for i in order[:top_k] for child in children(*last[i])])
    candidates = [candidate for level in levels for candidate in level]
    best = sorted(range(len(candidates)), key=lambda i: (-candidates[i][1], i))[: shape.num_nodes - 1]
    return candidates, [candidates[i] for i in sorted(best)]


def path_at(tree: Tree, b: int, node: int) -> Path:
    return tuple(int(tree.tokens[b, n]) for n in tree.paths()[b, node].tolist() if n > 0)


shapes = st.builds(TreeShape, depth=st.integers(1, 5), top_k=st.integers(1, 5), num_nodes=st.integers(1, 40))


@settings(deadline=None)
@given(shape=shapes, vocab=st.integers(2, 9), sequences=st.lists(st.integers(0, 99), min_size=1, max_size=4))
@example(shape=TreeShape(depth=6, top_k=10, num_nodes=60), vocab=50, sequences=[1, 2])
@example(shape=TreeShape(depth=3, top_k=7, num_nodes=100), vocab=4, sequences=[3])
@example(shape=TreeShape(depth=8, top_k=1, num_nodes=30), vocab=6, sequences=[4, 5])
@example(shape=TreeShape(depth=1, top_k=1, num_nodes=1), vocab=6, sequences=[4])
def test_trees_are_those_of_the_method(shape: TreeShape, vocab: int, sequences: list[int]) -> None:
    network = PathNetwork(sequences, vocab)
    roots = torch.arange(len(sequences)) + 100
    tree = draft_trees(network, *network.first(), roots, shape)
    tree.check()
    assert network.steps == (0 if shape.num_nodes == 1 else shape.depth - 1)
    for b, sequence in enumerate(sequences):
        _, expected = naive(network, sequence, shape)
        assert int(tree.tokens[b, 0]) == 100 + b
        assert int(tree.sizes[b]) == tree.num_nodes == 1 + len(expected)
        assert [path_at(tree, b, node) for node in range(1, tree.num_nodes)] == [path for path, _ in expected]
        torch.testing.assert_close(
            tree.scores[b, 1:], torch.tensor([float(score) for _, score in expected]), atol=1e-5, rtol=1e-5
        )


@settings(deadline=None)
@given(shape=shapes, sequences=st.lists(st.integers(0, 99), min_size=2, max_size=5))
def test_a_batch_is_each_sequence_alone(shape: TreeShape, sequences: list[int]) -> None:
    def candidates(chosen: list[int]) -> list[Tensor]:
        network = PathNetwork(chosen, 8)
        found = expand(network, *network.first(), shape)
        return [found.tokens, found.parents, found.scores, select(found, shape.num_nodes - 1)]

    together = candidates(sequences)
    for b, sequence in enumerate(sequences):
        for whole, alone in zip(together, candidates([sequence]), strict=True):
            assert torch.equal(whole[b], alone[0])


@settings(deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), silent=st.integers(0, 6))
def test_tokens_without_probability_come_last_and_break_nothing(shape: TreeShape, seed: int, silent: int) -> None:
    network = PathNetwork([seed], vocab=7, silent=silent)
    tree = draft_trees(network, *network.first(), torch.tensor([0]), shape)
    tree.check()
    _, expected = naive(network, seed, shape)
    possible = [path for path, score in expected if score > -np.inf]
    drafted = [path_at(tree, 0, node) for node in range(1, tree.num_nodes) if float(tree.scores[0, node]) > -torch.inf]
    assert drafted == possible


@settings(deadline=None)
@given(shape=shapes, vocab=st.integers(2, 6), certain=st.booleans())
def test_equal_scores_take_parents_before_children(shape: TreeShape, vocab: int, certain: bool) -> None:
    """Flat logits make whole levels equal; a certain token makes a child equal to its parent."""

    class Flat(PathNetwork):
        def logits(self, sequence: int, path: Path) -> Tensor:
            logits = torch.zeros(self.vocab)
            if certain:
                logits[1:] = -torch.inf
            return logits

    network = Flat([0], vocab)
    candidates = expand(network, *network.first(), shape)
    kept = select(candidates, shape.num_nodes - 1)[0].tolist()
    assert kept == sorted(kept)
    for index in kept:
        parent = int(candidates.parents[0, index])
        assert parent < index
        assert parent in kept or parent == -1
    # (score descending, index ascending) and nothing else decides.
    scores = candidates.scores[0].tolist()
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert kept == sorted(order[: shape.num_nodes - 1])
    network = Flat([0], vocab)
    draft_trees(network, *network.first(), torch.tensor([0]), shape).check()


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    top_k=st.integers(1, 50),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_childs_log_probability_is_never_above_zero(values: list[float], top_k: int, dtype: torch.dtype) -> None:
    log_probs, tokens = best_children(torch.tensor([values]).to(dtype), top_k)
    assert log_probs.shape == tokens.shape == (1, min(top_k, len(values)))
    assert log_probs.dtype == torch.float32
    assert (log_probs <= 0).all()
    assert len(set(tokens[0].tolist())) == tokens.shape[1]
    expected = torch.tensor([values]).to(dtype).double().log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), expected.gather(1, tokens), atol=2e-3, rtol=1e-5)
    assert sorted(log_probs[0].tolist(), reverse=True) == log_probs[0].tolist()


@pytest.mark.parametrize("name", ["depth", "top_k", "num_nodes"])
def test_a_shape_below_one_is_refused(name: str) -> None:
    sizes = {"depth": 2, "top_k": 2, "num_nodes": 2, name: 0}
    with pytest.raises(ValueError, match=rf"^{name} is at least 1, got 0$"):
        TreeShape(**sizes)
