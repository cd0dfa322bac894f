"""The other ways to draft that are measured beside EAGLE-2: each against a plain reading of its rule."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle2.speculative.ablation import Ablation
from eagle2.speculative.draft import DraftNetwork, Policy, TreeShape, draft_trees
from eagle2.speculative.static import Eagle1, RankPath, Rates, StaticTree, best_static_paths
from eagle2.speculative.tree import Tree

HIDDEN = 2
Path = tuple[int, ...]


class Table:
    """A head whose logits after a path are drawn from the path; it checks what it is given as it goes."""

    def __init__(self, seeds: list[int], vocab: int) -> None:
        self.seeds, self.vocab = seeds, vocab
        self.widths: list[int] = []
        self._paths: list[list[Path]] = [[] for _ in seeds]

    def logits(self, b: int, path: Path) -> Tensor:
        seed = hash((self.seeds[b], *path)) % (1 << 31)
        return 2 * torch.randn(self.vocab, generator=torch.Generator().manual_seed(seed))

    def output(self, b: int, path: Path) -> Tensor:
        return torch.tensor([float(hash(path) % 1000), float(self.seeds[b])])

    def step(self, tokens: Tensor, features: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        self.widths.append(tokens.shape[1])
        outputs, logits = [], []
        for b in range(len(self.seeds)):
            paths: list[Path] = []
            for i, token in enumerate(tokens[b].tolist()):
                above: Path = ()
                for row in ancestors[b, i].tolist():
                    assert self._paths[b][row][:-1] == above
                    above = self._paths[b][row]
                assert torch.equal(features[b, i], self.output(b, above)), "the parent's output"
                paths.append((*above, token))
            self._paths[b] += paths
            outputs.append(torch.stack([self.output(b, path) for path in paths]))
            logits.append(torch.stack([self.logits(b, path) for path in paths]))
        return torch.stack(outputs), torch.stack(logits)

    def children(self, b: int, path: Path) -> list[tuple[int, float]]:
        """(token, log-probability), the likeliest first."""
        log_probs = self.logits(b, path).log_softmax(0)
        order = sorted(range(self.vocab), key=lambda token: -float(log_probs[token]))
        return [(token, float(log_probs[token])) for token in order]


def drawn(policy: Policy, seeds: list[int], vocab: int, shape: TreeShape) -> tuple[list[list[Path]], Tree, Table]:
    """The paths of each tree's nodes, in tree order, after all checks that hold for any policy."""
    table = Table(seeds, vocab)
    features = torch.stack([table.output(b, ()) for b in range(len(seeds))])
    logits = torch.stack([table.logits(b, ()) for b in range(len(seeds))])
    network: DraftNetwork = table
    tree = policy(network, features, logits, torch.arange(len(seeds)) + 50, shape)
    tree.check()
    assert tree.tokens[:, 0].tolist() == [50 + b for b in range(len(seeds))]
    assert len(table.widths) < shape.depth or shape.num_nodes == 1
    assert all(width <= min(shape.top_k, vocab) for width in table.widths)
    found = []
    for b in range(len(seeds)):
        node_paths = tree.paths()[b].tolist()
        paths = [tuple(int(tree.tokens[b, n]) for n in path[1:] if n >= 0) for path in node_paths[1:]]
        assert len(set(paths)) == len(paths) <= shape.num_nodes - 1
        for path, score in zip(paths, tree.scores[b, 1:].tolist(), strict=True):
            steps = [dict(table.children(b, path[:i]))[token] for i, token in enumerate(path)]
            assert score == pytest.approx(sum(steps), abs=1e-4), "scores are path log-probabilities, whatever the rule"
        found.append(paths)
    return found, tree, table


def ablated(table: Table, b: int, shape: TreeShape, value: bool, rerank: bool) -> set[Path]:
    """The paper's rule with the two switches, path by path."""
    k = min(shape.top_k, table.vocab)
    level = [((token,), [own]) for token, own in table.children(b, ())[:k]]
    beams, everything = [], []
    for depth in range(1, shape.depth + 1):
        everything += level
        merit = sum if value else lambda steps: steps[-1]  # type: ignore[assignment]
        beam = sorted(level, key=lambda node: -merit(node[1]))[:k]
        beams += beam
        if depth < shape.depth:
            children = ((path, steps, table.children(b, path)[:k]) for path, steps in beam)
            level = [((*path, token), [*steps, own]) for path, steps, best in children for token, own in best]
    if not rerank:
        return {path for path, _ in beams[: shape.num_nodes - 1]}
    kept: set[Path] = set()
    while len(kept) < min(shape.num_nodes - 1, len(everything)):
        # The best node whose parent is kept already, one at a time.
        open_nodes = [(p, s) for p, s in everything if p not in kept and (len(p) == 1 or p[:-1] in kept)]
        best = max(open_nodes, key=lambda node: (sum if value else min)(node[1]))
        kept.add(best[0])
    return kept


shapes = st.builds(TreeShape, depth=st.integers(1, 4), top_k=st.integers(1, 4), num_nodes=st.integers(1, 24))


@settings(deadline=None, max_examples=60)
@given(
    shape=shapes,
    vocab=st.integers(2, 8),
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=3),
    value=st.booleans(),
    rerank=st.booleans(),
)
@example(shape=TreeShape(6, 10, 60), vocab=30, seeds=[1, 2], value=False, rerank=False)
@example(shape=TreeShape(6, 10, 60), vocab=30, seeds=[1, 2], value=False, rerank=True)
def test_an_ablation_is_the_method_without_one_idea(
    shape: TreeShape, vocab: int, seeds: list[int], value: bool, rerank: bool
) -> None:
    found, tree, table = drawn(Ablation(value, rerank), seeds, vocab, shape)
    for b, paths in enumerate(found):
        expected = ablated(table, b, shape, value, rerank) if shape.num_nodes > 1 else set()
        if value or not rerank:
            assert set(paths) == expected
        else:
            # Below a weak node all that is stronger ties with it: only how weak the kept ones are is settled.
            least = [sorted(_least(table, b, path) for path in group) for group in (paths, expected)]
            assert least[0] == pytest.approx(least[1])
    if value and rerank:
        usual = drawn(draft_trees, seeds, vocab, shape)[1]
        assert all(torch.equal(getattr(tree, name), getattr(usual, name)) for name in ("tokens", "parents", "scores"))


def _least(table: Table, b: int, path: Path) -> float:
    return min(dict(table.children(b, path[:i]))[token] for i, token in enumerate(path))


def test_without_rerank_the_papers_tree_is_its_beams() -> None:
    (paths,), _, _ = drawn(Ablation(rerank=False), [3], 40, TreeShape(6, 10, 61))
    assert [sum(len(path) == depth for path in paths) for depth in range(1, 7)] == [10] * 6


def test_own_confidence_expands_what_the_path_product_would_not() -> None:
    """Two likely children below an unlikely node win the beam from the likely node's children."""

    class Hand(Table):
        def logits(self, b: int, path: Path) -> Tensor:
            first = {(): [0.7, 0.2, 0.1], (0,): [0.4, 0.35, 0.25], (1,): [0.5, 0.45, 0.05]}
            return torch.tensor(first.get(path[:2], [0.8, 0.15, 0.05])).log()

    def levels(policy: Policy) -> set[Path]:
        table = Hand([0], 3)
        tree = policy(
            table, table.output(0, ())[None], table.logits(0, ())[None], torch.tensor([9]), TreeShape(3, 2, 7)
        )
        return {tuple(int(tree.tokens[0, n]) for n in path[1:] if n >= 0) for path in tree.paths()[0].tolist()[1:]}

    value = {(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0)}
    assert levels(draft_trees) == levels(Ablation()) == value
    assert levels(Ablation(rerank=False)) == value
    # 0.5 and 0.45 below the unlikely (1,) against 0.4 and 0.35 below (0,).
    assert levels(Ablation(value=False, rerank=False)) == {(0,), (1,), (1, 0), (1, 1), (1, 0, 0), (1, 1, 0)}
    # All below (1,) is held back by its 0.2: ties go to the shallower and then to the earlier node.
    assert levels(Ablation(value=False)) == {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}


RATES: Rates = ((0.6, 0.15, 0.08, 0.05), (0.5, 0.2, 0.05, 0.01), (0.4, 0.1, 0.2, 0.0))


def expected_acceptance(paths: set[RankPath], rates: Rates) -> float:
    total = 0.0
    for path in paths:
        worth = 1.0
        for depth, rank in enumerate(path):
            worth *= rates[min(depth, len(rates) - 1)][rank]
        total += worth
    return total


@pytest.mark.parametrize("num_nodes", range(2, 8))
def test_no_static_tree_of_its_size_promises_more(num_nodes: int) -> None:
    """All trees over three ranks and three levels, by brute force."""
    layer: set[frozenset[RankPath]] = {frozenset()}
    for _ in range(num_nodes - 1):
        layer = {
            tree | {place}
            for tree in layer
            for length in (1, 2, 3)
            for place in product(range(3), repeat=length)
            if place not in tree and (length == 1 or place[:-1] in tree)
        }
    best_value = max(expected_acceptance(set(tree), RATES) for tree in layer)
    chosen = best_static_paths(RATES, TreeShape(depth=3, top_k=3, num_nodes=num_nodes))
    assert len(set(chosen)) == num_nodes - 1
    assert expected_acceptance(set(chosen), RATES) == pytest.approx(best_value)


@settings(deadline=None)
@given(
    shape=st.builds(TreeShape, depth=st.integers(1, 6), top_k=st.integers(1, 5), num_nodes=st.integers(1, 70)),
    rates=st.lists(st.lists(st.floats(0, 1), min_size=5, max_size=5).map(tuple), min_size=1, max_size=7).map(tuple),
)
@example(shape=TreeShape(6, 1, 60), rates=((0.1, 0.9, 0.0, 0.0, 0.0),))
@example(shape=TreeShape(2, 2, 3), rates=((0.0,) * 5,))
def test_a_static_tree_keeps_to_its_shape(shape: TreeShape, rates: Rates) -> None:
    paths = best_static_paths(rates, shape)
    room = sum(shape.top_k ** min(depth, 2) for depth in range(1, shape.depth + 1))
    assert len(paths) == len(set(paths)) == min(shape.num_nodes - 1, room)
    for path in paths:
        assert len(path) <= shape.depth
        assert all(0 <= rank < shape.top_k for rank in path)
        assert len(path) == 1 or path[:-1] in paths
    for depth in range(1, shape.depth):
        assert len({path[:-1] for path in paths if len(path) == depth + 1}) <= shape.top_k


@settings(deadline=None, max_examples=60)
@given(
    shape=st.builds(TreeShape, depth=st.integers(1, 5), top_k=st.integers(1, 4), num_nodes=st.integers(1, 30)),
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=3),
    vocab=st.integers(2, 7),
)
def test_a_static_tree_takes_its_ranks_whatever_the_confidences(shape: TreeShape, seeds: list[int], vocab: int) -> None:
    found, _, table = drawn(Eagle1(RATES), seeds, vocab, shape)
    fitting = TreeShape(shape.depth, min(shape.top_k, vocab), shape.num_nodes)
    places = set(best_static_paths(RATES, fitting))
    for b, paths in enumerate(found):
        ranks = set()
        for path in paths:
            place = []
            for i, token in enumerate(path):
                place.append([child for child, _ in table.children(b, path[:i])].index(token))
            ranks.add(tuple(place))
        assert ranks == places


def test_a_place_without_its_parent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the place \(1, 0\) has no parent"):
        StaticTree([(0,), (1, 0)])
    with pytest.raises(ValueError, match="names each place once"):
        StaticTree([(0,), (0,)])
    with pytest.raises(ValueError, match="never the root"):
        StaticTree([(), (0,)])
