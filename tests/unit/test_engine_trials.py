"""Two ways of doing steps: the better one is found, kept, given up and taken up, and trials cost next to nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.engine.trials import Trials, size_of


class Ways:
    """Runs steps in the way that trials say. A way takes so many seconds and yields so many tokens of a sequence."""

    def __init__(self, trials: Trials, *, noise: float = 0.0, seed: int = 0) -> None:
        self.trials, self.noise = trials, noise
        self.seconds = {False: 0.010, True: 0.010}
        self.tokens = {False: 1.0, True: 1.0}
        self.rng = np.random.default_rng(seed)
        self.steps = {False: 0, True: 0}

    def run(self, steps: int, sequences: int = 4, *, starts_other: bool = False, may_try: bool = True) -> float:
        """The share of the other way."""
        before = dict(self.steps)
        for _ in range(steps):
            other = self.trials.is_other(sequences, starts_other=starts_other)
            seconds = self.seconds[other] * float(np.exp(self.noise * self.rng.standard_normal()))
            self.trials.observe(other, sequences, self.tokens[other] * sequences, seconds, may_try=may_try)
            self.steps[other] += 1
        return (self.steps[True] - before[True]) / steps


@pytest.mark.parametrize("starts_other", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("seconds", "tokens"), [(0.012, 1.0), (0.020, 2.4), (0.020, 1.7), (0.008, 1.0)])
def test_the_better_way_is_found_wherever_it_begins(
    starts_other: bool, noise: float, seconds: float, tokens: float
) -> None:
    ways = Ways(Trials(memory=300, share=0.02, margin=1.03, eager=2), noise=noise)
    ways.seconds[True], ways.tokens[True] = seconds, tokens
    ways.run(2000, starts_other=starts_other)
    share = ways.run(4000, starts_other=starts_other)
    is_better = tokens / seconds > 1 / 0.010
    assert share > 0.97 if is_better else share < 0.03


def test_eager_trials_begin_at_once() -> None:
    for eager, most in ((2, 40), (0, 2000)):
        ways = Ways(Trials(memory=300, share=0.02, margin=1.03, eager=eager))
        ways.seconds[True] = 0.020
        steps = 0
        while ways.trials.judged(4) is None:
            ways.run(1, starts_other=True)
            steps += 1
        assert steps <= most
        assert eager or steps > 400, "else only so many that they take their share of the time"


def test_a_way_that_has_become_better_is_taken_up() -> None:
    ways = Ways(Trials(memory=300, share=0.02, margin=1.03))
    ways.seconds[True] = 0.015
    assert ways.run(4000) < 0.03
    ways.seconds[True] = 0.007
    ways.run(6000)
    assert ways.run(4000) > 0.97


def test_what_cannot_pay_is_never_tried() -> None:
    ways = Ways(Trials(memory=300, share=0.02, margin=1.03, eager=2))
    assert ways.run(3000, may_try=False) == 0
    assert ways.trials.num_trials == 0


def test_a_small_gain_is_no_reason_to_change() -> None:
    ways = Ways(Trials(memory=300, share=0.02, margin=1.03))
    ways.seconds[True] = 0.0099
    assert ways.run(8000) < 0.03


def test_steps_that_tell_nothing_are_only_time() -> None:
    trials = Trials(memory=300, share=0.02, margin=1.03, eager=2)
    for _ in range(500):
        trials.is_other(4)
        trials.observe(None, 4, 4, 0.01)
    assert trials.num_trials == 0


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 2**32))
def test_other_sizes_are_apart_and_nothing_breaks(sizes: list[int], seed: int) -> None:
    """Whatever comes and goes: every batch of one size has what is known for its size alone."""
    ways = Ways(Trials(memory=300, share=0.05, margin=1.03, eager=2), noise=0.2, seed=seed)
    ways.seconds[True] = 0.05
    for size in sizes:
        ways.run(30, size, starts_other=True)
    for size in set(map(size_of, sizes)):
        assert ways.trials.judged(size) in (False, None), "five times as slow: nobody keeps to that"


def test_the_same_measurements_give_the_same_ways() -> None:
    def shares() -> list[float]:
        ways = Ways(Trials(memory=300, share=0.02, margin=1.03, eager=1), noise=0.3, seed=3)
        ways.seconds[True] = 0.0095
        return [ways.run(100, size) for size in (1, 2, 8, 2, 1) for _ in range(10)]

    assert shares() == shares()


def test_sizes_count_as_one_where_they_are_near() -> None:
    groups: dict[int, list[int]] = {}
    for sequences in range(1, 25):
        groups.setdefault(size_of(sequences), []).append(sequences)
    assert groups == {
        1: [1], 2: [2], 3: [3], 4: [4], 6: [5, 6], 8: [7, 8],
        12: [9, 10, 11, 12], 16: [13, 14, 15, 16], 24: list(range(17, 25)),
    }  # fmt: skip
