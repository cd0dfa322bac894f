"""The budget of nodes: against brute force, under load, where drafting never pays, and when it pays again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.engine.budget import AdaptiveBudget, DraftedNodes, Load, StepPlan, best_count, needed_top_k
from eagle2.engine.costs import CostCurve, DraftCost, DraftCosts, StepCosts, sizes_up_to
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

Cost = Callable[[float], float]

_BOUNDS = TreeShape(4, 4, 21)


def memory_bound(rows: float) -> float:
    """Flat up to 32 rows, then rising: a GPU, or a CPU with few rows."""
    return 0.020 + 0.0008 * max(0.0, rows - 32)


def compute_bound(rows: float) -> float:
    return 0.002 + 0.004 * rows


def curve(cost: Cost, most: int = 512) -> CostCurve:
    sizes = sizes_up_to(most)
    return CostCurve(sizes, [cost(size) for size in sizes])


def budget_of(verify: Cost, draft: Cost, bounds: TreeShape = _BOUNDS) -> AdaptiveBudget:
    return AdaptiveBudget(bounds, StepCosts(curve(verify)), DraftCosts(curve(draft), overhead_s=1e-6))


def tree_nodes(rng: np.random.Generator, confidences: tuple[float, ...], shape: TreeShape, tree: int) -> DraftedNodes:
    """A tree as expansion and rerank make it: each node's children have these confidences, times some noise."""
    level = [(-1, 0.0)]
    nodes: list[tuple[float, int, int]] = []
    for depth in range(1, shape.depth + 1):
        begin = len(nodes)
        for parent, score in level:
            chances = np.array(confidences) * rng.uniform(0.6, 1.0)
            nodes += [(score + float(np.log(c)), depth, parent) for c in chances[: shape.top_k]]
        best = sorted(range(begin, len(nodes)), key=lambda i: -nodes[i][0])[: shape.top_k]
        level = [(i, nodes[i][0]) for i in best]
    chosen = sorted(sorted(range(len(nodes)), key=lambda i: -nodes[i][0])[: shape.num_nodes - 1])
    place = {node: i for i, node in enumerate(chosen)}
    scores, depths, parents = zip(*(nodes[i] for i in chosen), strict=True)
    return DraftedNodes(
        np.array(scores),
        np.array(depths),
        np.array([-1 if parent < 0 else place[parent] for parent in parents]),
        np.full(len(chosen), tree),
    )


def joined(trees: list[DraftedNodes]) -> DraftedNodes:
    begins = np.cumsum([0, *(len(tree.scores) for tree in trees)])
    parents = [np.where(t.parents < 0, -1, t.parents + b) for t, b in zip(trees, begins, strict=False)]
    scores, depths, places = (
        np.concatenate([getattr(t, name) for t in trees]) for name in ("scores", "depths", "trees")
    )
    return DraftedNodes(scores, depths, np.concatenate(parents), places)


class Machine:
    """Steps a budget on a machine of known costs, whose target accepts nodes by known chances.

    ``chance``: the share of what the draft says that is true. ``hidden_s``: what a tree takes of a step beside its
    drafting and its rows, which nobody measures apart.
    """

    def __init__(self, budget: AdaptiveBudget, verify: Cost, draft: Cost, confidences: tuple[float, ...]) -> None:
        self.budget, self.verify, self.draft, self.confidences = budget, verify, draft, confidences
        self.chance, self.hidden_s = 1.0, 0.0
        self.rng = np.random.default_rng(5)
        self.seconds, self.tokens = 0.0, 0.0

    def step(self, sequences: int) -> tuple[StepPlan, float]:
        """The plan, and the verified nodes of a sequence."""
        load = Load(sequences, sequences)
        plan = self.budget.plan(load)
        nodes, drafted, began, before = 0, 0, self.seconds, self.tokens
        if plan.shape is not None:
            drafted = 1 if plan.alone else sequences
            trees = joined([tree_nodes(self.rng, self.confidences, plan.shape, i) for i in range(drafted)])
            kept = self.budget.keep(trees, load, plan)
            assert all(kept[parent] for parent in trees.parents[kept] if parent >= 0)
            taken = self._accept(trees)
            self.budget.values.observe(trees.scores[kept], trees.depths[kept], taken[kept])
            nodes = int(kept.sum())
            self.tokens += int((taken & kept).sum())
            draft_s = self.draft(2 * drafted) + (plan.shape.depth - 1) * self.draft(drafted * plan.shape.top_k)
            self.budget.observe_draft(
                DraftCost(2 * drafted, plan.shape.depth, drafted * plan.shape.top_k, draft_s), drafted
            )
            self.seconds += draft_s + self.hidden_s * drafted
        self.tokens += sequences
        self.seconds += self.verify(sequences + nodes)
        self.budget.end_step(sequences + nodes, 0, self.verify(sequences + nodes), is_measure=True)
        self.budget.whole_step(load, drafted, int(self.tokens - before), self.seconds - began)
        return plan, nodes / sequences

    def _accept(self, nodes: DraftedNodes) -> np.ndarray:
        """At each accepted node at most one child is accepted, each with its own chance."""
        taken = np.zeros(len(nodes.scores), np.bool_)
        for tree in np.unique(nodes.trees):
            at = -1
            while True:
                children = np.flatnonzero((nodes.parents == at) & (nodes.trees == tree))
                above = 0.0 if at < 0 else nodes.scores[at]
                chances = self.chance * np.exp(nodes.scores[children] - above)
                pick = self.rng.uniform()
                passed = np.flatnonzero(np.cumsum(chances) > pick)
                if not len(passed):
                    break
                at = int(children[passed[0]])
                taken[at] = True
        return taken

    def run(self, steps: int, sequences: int) -> tuple[list[StepPlan], float]:
        """All plans, and verified nodes of a sequence and step, the first part of the run left out."""
        outcomes = [self.step(sequences) for _ in range(steps)]
        late = outcomes[steps // 2 :]
        return [plan for plan, _ in outcomes], sum(nodes for _, nodes in late) / len(late)


@settings(deadline=None)
@given(
    st.lists(st.floats(0.0, 1.0), max_size=7),
    st.integers(1, 4),
    st.lists(st.floats(0.001, 1.0), min_size=8, max_size=8),
)
def test_no_subset_of_the_nodes_makes_more_tokens_per_second(
    values: list[float], decoding: int, costs: list[float]
) -> None:
    """Whatever the costs: brute force over all subsets."""
    descending = np.array(sorted(values, reverse=True))
    seconds = np.array(costs[: len(values) + 1])
    count, rate = best_count(descending, decoding, seconds)
    subsets = ([value for i, value in enumerate(values) if mask >> i & 1] for mask in range(1 << len(values)))
    best = max((decoding + sum(subset)) / seconds[len(subset)] for subset in subsets)
    assert rate == pytest.approx(best)
    assert rate == pytest.approx((decoding + descending[:count].sum()) / seconds[count])


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([memory_bound, compute_bound]))
def test_what_is_kept_is_of_trees_and_the_best_there_is(seed: int, sequences: int, cost: Cost) -> None:
    rng = np.random.default_rng(seed)
    shape = TreeShape(3, 3, 10)
    nodes = joined([tree_nodes(rng, (0.6, 0.2, 0.1), shape, i) for i in range(sequences)])
    budget = budget_of(cost, memory_bound)
    load, plan = Load(sequences + 1, sequences), StepPlan(shape, draft_s=0.003)
    kept = budget.keep(nodes, load, plan)
    assert all(kept[parent] for parent in nodes.parents[kept] if parent >= 0)
    values = budget.values.of(nodes.scores, nodes.depths, nodes.parents)

    def rate(chosen: np.ndarray) -> float:
        rows = load.decoding + len(chosen)
        return (load.decoding + chosen.sum()) / (plan.draft_s + budget.verify.at(rows, load.context))

    ordered = np.sort(values)[::-1]
    assert rate(values[kept]) == pytest.approx(max(rate(ordered[:count]) for count in range(len(ordered) + 1)))


def test_needed_top_k_is_what_a_smaller_expansion_would_have_drafted() -> None:
    for seed in range(30):
        confidences = (0.5, 0.25, 0.12, 0.06)
        # One confidence for all children of a place: a smaller top_k then draws the same numbers in the same order.
        whole = TreeShape(2, 4, 100)
        nodes = tree_nodes(np.random.default_rng(seed), confidences, whole, 0)
        needed = needed_top_k(nodes)
        first = nodes.depths == 1
        assert needed[first].tolist() == [1, 2, 3, 4]
        for k in (1, 2, 3, 4):
            assert (needed <= k).sum() == k + k * k
        assert all(needed[i] >= needed[p] for i, p in enumerate(nodes.parents) if p >= 0)


def test_more_sequences_leave_fewer_nodes_for_each_where_rows_cost() -> None:
    """Free rows first, dear ones then: alone there is a large tree, with many sequences hardly any."""
    nodes_each = []
    for sequences in (1, 2, 4, 8, 16, 32):
        budget = budget_of(memory_bound, lambda _: 0.001)
        machine = Machine(budget, memory_bound, lambda _: 0.001, (0.6, 0.2, 0.08, 0.04))
        nodes_each.append(machine.run(200, sequences)[1])
    assert nodes_each == sorted(nodes_each, reverse=True), nodes_each
    assert nodes_each[0] > 15, "the rows up to 32 are free"
    assert nodes_each[-1] < 4


def test_the_chosen_shape_is_as_good_as_the_best_fixed_one() -> None:
    """Costs of a CPU: levels of drafting are dear, so trees are shallow though deep ones are allowed."""
    draft: Cost = lambda rows: 0.004 + 0.0002 * rows  # noqa: E731
    verify: Cost = lambda rows: 0.024 + 0.0012 * max(0.0, rows - 8)  # noqa: E731
    confidences = (0.55, 0.15, 0.06, 0.03)

    def rate_of(bounds: TreeShape, shape: TreeShape | None = None) -> float:
        budget = budget_of(verify, draft, bounds)
        machine = Machine(budget, verify, draft, confidences)
        if shape is not None:
            budget.plan = lambda load: StepPlan(shape, draft_s=0.0)  # type: ignore[method-assign]
            budget.keep = lambda nodes, load, plan: np.ones(len(nodes.scores), np.bool_)  # type: ignore[method-assign]
        machine.run(250, 1)
        return machine.tokens / machine.seconds

    bounds = TreeShape(6, 4, 41)
    fixed = {
        (depth, k, drafted): rate_of(bounds, TreeShape(depth, k, drafted + 1))
        for depth in (1, 2, 3, 6)
        for k in (2, 4)
        for drafted in (4, 10, 40)
    }
    assert rate_of(bounds) > 0.95 * max(fixed.values()), max(fixed, key=fixed.__getitem__)
    assert max(fixed.values()) > 1.3 * fixed[6, 4, 40]


def test_plain_decoding_where_drafting_never_pays() -> None:
    """Every row costs the same and drafts are bad: no trees but for surveys, which take two per cent of the time."""
    machine = Machine(budget_of(compute_bound, compute_bound), compute_bound, compute_bound, (0.2, 0.1, 0.05, 0.02))
    machine.run(50, 4)
    machine.seconds = machine.tokens = 0.0
    plans, _ = machine.run(2000, 4)
    assert sum(plan.shape is None for plan in plans) > 0.9 * len(plans)
    assert any(plan.survey and plan.alone for plan in plans), "it looks whether drafting has come to pay"
    plain = 4 / compute_bound(4)
    assert machine.tokens / machine.seconds > 0.97 * plain


def test_drafting_comes_back_when_it_pays_again() -> None:
    draft: Cost = lambda _: 0.002  # noqa: E731
    machine = Machine(budget_of(memory_bound, draft), memory_bound, draft, (0.7, 0.15, 0.05, 0.02))
    plans, nodes = machine.run(400, 1)
    assert plans[-1].shape is not None
    assert nodes > 8
    machine.chance = 0.0  # a text that the draft has no idea of
    plans, _ = machine.run(1800, 1)
    assert sum(plan.shape is None for plan in plans[-900:]) > 680, "but for surveys, and a try now and then"
    machine.chance = 1.0
    plans, nodes = machine.run(3000, 1)
    assert sum(plan.shape is None for plan in plans[-100:]) <= 8, "but for a trial"
    assert nodes > 8


def test_a_dear_proposer_is_left_alone_and_taken_back() -> None:
    """The draft's cost is learnt from what drafting takes, not from what was thought at the start."""
    budget = budget_of(memory_bound, lambda _: 0.001)
    machine = Machine(budget, memory_bound, lambda _: 0.2, (0.7, 0.15, 0.05, 0.02))
    plans, _ = machine.run(600, 1)
    assert all(plan.shape is None or plan.survey for plan in plans[-100:])
    machine.draft = lambda _: 0.001
    plans, _ = machine.run(4000, 1)
    assert sum(plan.shape is None for plan in plans[-100:]) <= 8, "but for a trial"


def test_trees_are_given_up_where_whole_steps_show_that_they_lose() -> None:
    """Parts that were measured apart say that trees pay; what the parts do to each other says that they do not."""
    draft: Cost = lambda _: 0.001  # noqa: E731
    machine = Machine(budget_of(memory_bound, draft), memory_bound, draft, (0.7, 0.15, 0.05, 0.02))
    plans, _ = machine.run(200, 8)
    assert all(plan.shape is not None for plan in plans[-20:])
    machine.hidden_s = 0.02
    machine.run(2500, 8)
    machine.seconds = machine.tokens = 0.0
    plans, _ = machine.run(2000, 8)
    assert sum(plan.shape is None for plan in plans) > 0.93 * len(plans)
    assert machine.tokens / machine.seconds > 0.95 * 8 / memory_bound(8)
    plans, _ = machine.run(400, 1)
    assert machine.budget.trials.judged(8) is False
    machine.hidden_s = 0.0
    plans, _ = machine.run(6000, 8)
    assert all(plan.shape is not None for plan in plans[-20:]), "and taken up again when they do not"


def test_trees_that_lose_from_the_start_are_seen_within_a_few_steps() -> None:
    """A batch of a new size does not have to run for minutes first."""
    machine = Machine(budget_of(memory_bound, lambda _: 0.001), memory_bound, lambda _: 0.001, (0.7, 0.15, 0.05, 0.02))
    machine.hidden_s = 0.05
    plans, _ = machine.run(60, 16)
    assert sum(plan.shape is None for plan in plans[40:]) >= 15


def test_the_same_measurements_give_the_same_decisions() -> None:
    def decisions() -> list[tuple[StepPlan, float]]:
        machine = Machine(budget_of(memory_bound, compute_bound), memory_bound, compute_bound, (0.6, 0.2, 0.1, 0.02))
        return [machine.step(sequences) for sequences in (1, 3, 8, 2) for _ in range(40)]

    assert decisions() == decisions()


def test_rows_that_are_free_alone_are_not_beside_a_prompt() -> None:
    """Up to 32 rows cost what one does; behind 200 rows of a prompt each costs what a row costs."""
    nodes = tree_nodes(np.random.default_rng(1), (0.5, 0.2, 0.1, 0.05), TreeShape(4, 4, 21), 0)
    budget = budget_of(memory_bound, lambda _: 0.0)

    def kept(load: Load) -> int:
        return int(budget.keep(nodes, load, StepPlan(budget.bounds)).sum())

    assert kept(Load(8, 1)) == 20
    assert kept(Load(8, 1, 200)) < 20


def test_gauges_say_what_was_chosen_and_why() -> None:
    machine = Machine(budget_of(memory_bound, lambda _: 0.001), memory_bound, lambda _: 0.001, (0.6, 0.2, 0.1, 0.02))
    machine.run(64, 1)
    stats = Recorder()
    machine.budget.export(stats)
    assert stats.get(metrics.TREE_BUDGET_DEPTH) >= 2
    assert stats.get(metrics.TREE_BUDGET_TOP_K) >= 2
    assert stats.get(metrics.TREE_BUDGET_VERIFY_SECONDS, rows=1) == pytest.approx(0.020, rel=0.05)
    assert 0 < stats.get(metrics.TREE_BUDGET_CALIBRATION, drafted=0.5) < 1
