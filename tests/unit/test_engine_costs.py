"""Cost curves, and the values of nodes: what they learn from measurements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.engine.costs import CostCurve, DraftCost, DraftCosts, OwnCosts, StepCosts, sizes_up_to
from eagle2.engine.isotonic import isotonic
from eagle2.engine.values import NodeValues

weighted = st.lists(st.tuples(st.floats(-10, 10), st.floats(0.1, 10)), min_size=1, max_size=12)


@settings(deadline=None)
@given(weighted)
def test_isotonic_rises_and_keeps_the_mean(pairs: list[tuple[float, float]]) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    fitted = isotonic(values, weights)
    assert (np.diff(fitted) >= 0).all()
    assert (fitted * weights).sum() == pytest.approx((values * weights).sum(), abs=1e-9)
    assert isotonic(np.sort(values), weights).tolist() == pytest.approx(np.sort(values).tolist())


@settings(deadline=None)
@given(weighted, st.integers(0, 2**32))
def test_no_rising_sequence_is_nearer_than_isotonic(pairs: list[tuple[float, float]], seed: int) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    fitted = isotonic(values, weights)
    rng = np.random.default_rng(seed)
    for scale in (0.01, 1.0):
        other = np.sort(fitted + scale * rng.normal(size=len(values)))
        assert (weights * (fitted - values) ** 2).sum() <= (weights * (other - values) ** 2).sum() + 1e-9


@pytest.mark.parametrize("most", [1, 2, 3, 8, 88, 480, 1920])
def test_sizes_ascend_to_the_largest(most: int) -> None:
    sizes = sizes_up_to(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) < 24


# Row counts whose results agree on a CPU with AMX, and on one without.
FAR_APART = (40, 48, 56, 64, 80, 96, 112, 128, 160, 192)
NEAR = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


def test_sizes_are_the_row_counts_that_a_forward_is_padded_to() -> None:
    assert sizes_up_to(11, FAR_APART) == (1, 40)
    assert sizes_up_to(88, FAR_APART) == (1, 40, 48, 56, 64, 80, 96)
    assert sizes_up_to(11, NEAR) == (1, 2, 4, 8, 11)
    assert sizes_up_to(50, NEAR) == (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56)
    # Beyond the largest one a forward is cut into several.
    assert sizes_up_to(500, FAR_APART)[-4:] == (192, 256, 384, 500)


@pytest.mark.parametrize("tiles", [(), NEAR, FAR_APART])
@pytest.mark.parametrize("most", [1, 2, 7, 39, 40, 41, 300])
def test_sizes_ascend_from_one_and_cover_the_largest(most: int, tiles: tuple[int, ...]) -> None:
    sizes = sizes_up_to(most, tiles)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] >= most


def test_a_curve_jumps_behind_a_tile_and_not_before_it() -> None:
    sizes = sizes_up_to(64, FAR_APART)
    curve = CostCurve(sizes, [10.0, 13.9, 20.0, 20.8, 30.0], tiles=FAR_APART)
    inside = curve(np.array([1.0, 20.0, 39.0, 40.0]))
    assert np.diff(inside).max() == pytest.approx(1.9)
    behind = curve(np.array([40.0, 41.0, 48.0, 49.0, 56.0, 57.0, 64.0]))
    assert behind.tolist() == pytest.approx([13.9, 19.3, 20.0, 20.1, 20.8, 29.3, 30.0])


def test_a_curve_between_and_beyond_its_sizes() -> None:
    curve = CostCurve((1, 4, 8), (1.0, 1.0, 2.0))
    assert curve(np.array([0.5, 1, 3, 6, 8, 12])).tolist() == pytest.approx([1, 1, 1, 1.5, 2, 3])
    assert CostCurve((1,), (0.5,)).at(7) == 0.5


def test_a_measurement_that_falls_is_levelled() -> None:
    curve = CostCurve((1, 2, 4, 8), (3.0, 2.0, 1.0, 5.0))
    assert (np.diff(curve(np.arange(1, 12, dtype=np.float64))) >= 0).all()
    assert curve.at(1) == curve.at(4) == pytest.approx(2.0)


def test_a_curve_follows_the_machine_and_forgives_outliers() -> None:
    rng = np.random.default_rng(2)
    curve = CostCurve(sizes_up_to(64), [0.02] * len(sizes_up_to(64)))

    def truth(rows: float) -> float:
        return 0.03 + 0.001 * max(0.0, rows - 16)

    for _ in range(1500):
        rows = int(rng.integers(1, 65))
        # Every tenth step meets a machine that is elsewhere for up to twenty times as long.
        slow = rng.uniform(2, 20) if rng.uniform() < 0.1 else 1.0
        curve.observe(rows, truth(rows) * slow * float(np.exp(0.1 * rng.normal())))
    for rows in (1, 8, 16, 32, 48, 64):
        assert curve.at(rows) == pytest.approx(truth(rows), rel=0.2)


def test_a_row_costs_more_behind_a_longer_context() -> None:
    costs = StepCosts(CostCurve((1, 8, 64), (1.0, 1.0, 2.0)), context=100, position_s=0.001)
    rows = np.array([1.0, 8.0, 64.0])
    assert costs(rows, 100).tolist() == [1.0, 1.0, 2.0]
    assert costs(rows, 600).tolist() == pytest.approx([1.5, 5.0, 34.0])
    assert (costs(rows, 0) > 0).all()


def test_what_a_context_costs_is_not_taken_for_a_slower_machine() -> None:
    costs = StepCosts(CostCurve((1, 8, 64), (1.0, 1.0, 2.0)), context=100, position_s=0.001)
    for _ in range(100):
        costs.observe(8, 1100, 9.0)
    assert costs.at(8, 100) == pytest.approx(1.0)
    for _ in range(200):
        costs.observe(8, 100, 2.0)
    assert costs.at(8, 100) == pytest.approx(2.0, rel=0.01)


def test_what_a_tree_takes_beside_drafting_is_the_difference_to_plain_steps() -> None:
    own = OwnCosts()
    assert own.tree_s == 0
    for _ in range(300):
        own.observe(0, 0.001)
        own.observe(8, 0.005)
    assert own.tree_s == pytest.approx(0.0005)
    for _ in range(300):
        own.observe(1, 0.0005)  # by mistake of the clock, less than a plain step
    assert own.tree_s == 0


def test_one_size_tells_something_of_all_and_most_of_itself() -> None:
    curve = CostCurve((1, 8, 64), (1.0, 1.0, 2.0))
    for _ in range(200):
        curve.observe(8, 2.0)
    assert curve.at(8) == pytest.approx(2.0, rel=0.01)
    assert 1.2 < curve.at(1) < 1.8
    assert curve.at(64) > 2.2


def test_draft_costs_come_apart() -> None:
    """Only sums are measured: message, new rows and levels are told apart by shapes that differ."""

    def head(rows: float) -> float:
        return 0.002 + 0.0001 * rows

    def total(new_rows: int, depth: int, beam_rows: int) -> float:
        return 0.0005 + head(new_rows) + (depth - 1) * head(beam_rows)

    shapes = [(n, depth, n * k) for n in (1, 8) for depth, k in ((1, 8), (4, 1), (4, 4), (4, 8))]
    costs = DraftCosts(CostCurve(sizes_up_to(64), [0.01] * len(sizes_up_to(64)), guessed=True))
    costs.fit(DraftCost(*shape, total(*shape)) for shape in shapes)
    for shape in [*shapes, (1, 2, 8), (8, 3, 32)]:
        assert costs.at(*shape) == pytest.approx(total(*shape), rel=0.1)
    for _ in range(300):
        costs.observe(DraftCost(1, 2, 8, 3 * total(1, 2, 8)))
    assert costs.at(1, 2, 8) == pytest.approx(3 * total(1, 2, 8), rel=0.05)
    assert costs.at(8, 4, 64) > 1.5 * total(8, 4, 64), "a proposer that is slow is so for other shapes too"


def test_values_begin_as_what_the_draft_says() -> None:
    values = NodeValues()
    drafted = np.array([0.005, 0.05, 0.3, 0.55, 0.85])
    chances = values.of(np.log(drafted), np.ones(5, np.int64), np.full(5, -1))
    assert chances.tolist() == pytest.approx(drafted.tolist(), rel=0.02)


def test_values_become_the_true_chances() -> None:
    """Overconfident at depth 1, worse at depth 3; every value is tried and the right chance found."""
    rng = np.random.default_rng(4)

    def truth(drafted: np.ndarray, depth: np.ndarray) -> np.ndarray:
        return np.where(depth == 1, drafted**1.5, 0.5 * drafted**2)

    values = NodeValues()
    for _ in range(600):
        drafted, depths = rng.uniform(0, 1, 40), rng.choice([1, 3], 40)
        values.observe(np.log(drafted), depths, rng.uniform(size=40) < truth(drafted, depths))
        values.step()
    probes = np.array([0.05, 0.25, 0.45, 0.65, 0.85])
    for depth in (1, 3):
        # Depth 3 alone: below unknown parents of value 1, which bound nothing.
        parents = np.full(5, -1)
        found = values.of(np.log(probes), np.full(5, depth), parents) if depth == 1 else _at_depth_3(values, probes)
        assert found.tolist() == pytest.approx(truth(probes, np.full(5, depth)).tolist(), abs=0.06)


def _at_depth_3(values: NodeValues, drafted: np.ndarray) -> np.ndarray:
    """Chances of nodes whose ancestors are as likely as can be, one chain each."""
    found = []
    for value in drafted.tolist():
        scores = np.log(np.array([1.0, 1.0, value]))
        found.append(values.of(scores, np.array([1, 2, 3]), np.array([-1, 0, 1]))[2])
    return np.array(found)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_a_child_is_never_worth_more_than_its_parent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = NodeValues()
    for _ in range(20):
        scores, depths = np.log(rng.uniform(0.001, 1, 30)), rng.integers(1, 8, 30)
        values.observe(scores, depths, rng.uniform(size=30) < 0.5)
        values.step()
    parents = np.array([-1, -1, 0, 0, 2, 3, 4, 5, 6])
    depths = np.array([1, 1, 2, 2, 3, 3, 4, 4, 5])
    scores = np.zeros(9)
    for i, parent in enumerate(parents):
        scores[i] = (scores[parent] if parent >= 0 else 0.0) + np.log(rng.uniform(0.1, 1))
    chances = values.of(scores, depths, parents)
    assert all(chances[i] <= chances[p] for i, p in enumerate(parents) if p >= 0)
    assert ((chances >= 0) & (chances <= 1)).all()


def test_old_outcomes_fade() -> None:
    values = NodeValues()
    scores, depths = np.log(np.full(10, 0.5)), np.ones(10, np.int64)
    for accepted in (True, False):
        for _ in range(1000):
            values.observe(scores, depths, np.full(10, accepted))
            values.step()
        chance = values.of(scores[:1], depths[:1], np.array([-1]))[0]
        assert chance > 0.95 if accepted else chance < 0.1
