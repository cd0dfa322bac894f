"""How many prompt tokens a step takes: the maths, and what is learnt from clocks that tell exactly or with noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.engine.pace import Allowance, PromptCost, PromptPace

_SECONDS = st.floats(1e-6, 10)


@settings(deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(0, 1e-4), st.integers(0, 8000), st.floats(0, 1))
def test_as_many_tokens_as_fit(row_s: float, pair_s: float, start: int, seconds: float) -> None:
    cost = PromptCost(row_s, pair_s)
    count = cost.fit(start, seconds)
    assert cost(start, count) <= seconds * (1 + 1e-9)
    assert cost(start, count + 2) > seconds * (1 - 1e-9)


@given(st.integers(0, 4000), st.integers(0, 500), st.integers(0, 500))
def test_a_span_costs_what_its_parts_cost(start: int, first: int, second: int) -> None:
    cost = PromptCost(0.25, 0.125)
    assert cost(start, first) + cost(start + first, second) == cost(start, first + second)


@given(
    st.integers(1, 300),
    st.floats(0, 1),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 2000)), min_size=1, max_size=5),
)
def test_an_allowance_is_kept(tokens: int, seconds: float, rows: int, prompts: list[tuple[int, int]]) -> None:
    """Never more tokens than allowed, nor more seconds, but for the least that a step takes; and at least that."""
    cost = PromptCost(1e-3, 1e-6)
    allowance = Allowance(tokens, seconds, cost, rows)
    taken, spent = [], 0.0
    for start, wanted in prompts:
        count = allowance.fit(start, wanted)
        assert 0 <= count <= wanted
        allowance.take(start, count)
        taken.append(count)
        spent += cost(start, count)
    wanted = sum(wanted for _, wanted in prompts)
    assert min(tokens, wanted, 16) <= sum(taken) <= tokens
    assert spent <= seconds * (1 + 1e-9) or sum(taken) <= 16


@given(st.integers(0, 100), st.integers(17, 256), st.integers(0, 1000))
def test_steps_have_numbers_of_rows_that_linear_layers_like(rows: int, fitting: int, start: int) -> None:
    """Where a prompt is cut, the step's rows are a multiple of 16 or of 32: at the cost of 31 tokens at most."""
    cost = PromptCost(1e-3, 1e-6)
    count = Allowance(256, cost(start, fitting), cost, rows).fit(start, 10_000)
    assert count <= fitting
    if count > 16:
        step = 16 if rows + count <= 128 else 32
        assert (rows + count) % step == 0
        assert fitting - count <= 32  # a token may fall to rounding


def test_without_a_bound_or_without_anybody_who_waits_the_whole_chunk_is_taken() -> None:
    for pace, rows in ((PromptPace(256, None), 40), (PromptPace(256, 0.1), 0)):
        pace.observe(0.5, [(0, 256)], is_decoding=False)
        pace.observe(0.2, [], is_decoding=True)
        assert pace.allowance(rows).fit(0, 2000) == 256


def test_before_anything_is_known_prompts_get_on_a_little() -> None:
    assert PromptPace(256, 0.1).allowance(10).fit(0, 2000) == 16


def test_where_decoding_alone_reaches_the_bound_prompts_have_half_as_much_time() -> None:
    pace, cost = PromptPace(256, 0.1), PromptCost(2e-3, 1e-7)
    machine = Machine(0.2, cost)
    for _ in range(3):
        machine.decode(pace, 10)
        steps = machine.read(pace, 1000, rows=8)
    assert all(0.22 < seconds < 0.32 for seconds, _ in steps[:-1])
    # Where even the least number of tokens takes longer, they are taken all the same.
    slow = Machine(0.2, PromptCost(0.02, 1e-7))
    for _ in range(3):
        slow.decode(pace, 10)
        steps = slow.read(pace, 200, rows=8)
    assert {count for _, count in steps[:-1]} == {16}


class Machine:
    """Takes ``decode_s`` for sequences that decode and ``cost`` for prompts, times ``noise()``."""

    def __init__(self, decode_s: float, cost: PromptCost, noise: Callable[[], float] = lambda: 1.0) -> None:
        self.decode_s, self.cost, self.noise = decode_s, cost, noise

    def read(self, pace: PromptPace, prompt: int, *, rows: int) -> list[tuple[float, int]]:
        """(seconds, tokens) of every step until a prompt is read, beside ``rows`` that decode."""
        steps, start = [], 0
        while start < prompt:
            allowance = pace.allowance(rows)
            count = allowance.fit(start, prompt - start)
            assert count > 0, "prompts get on"
            seconds = (self.decode_s * bool(rows) + self.cost(start, count)) * self.noise()
            pace.observe(seconds, [(start, count)], is_decoding=bool(rows))
            steps.append((seconds, count))
            start += count
        return steps

    def decode(self, pace: PromptPace, steps: int) -> None:
        for _ in range(steps):
            pace.observe(self.decode_s * self.noise(), [], is_decoding=True)


MACHINES = {
    "rows dear, context cheap": Machine(0.03, PromptCost(1.5e-3, 2e-7)),
    "context dear": Machine(0.03, PromptCost(5e-4, 2e-6)),
    "fast": Machine(0.01, PromptCost(1e-4, 1e-8)),
    "slow": Machine(0.12, PromptCost(3e-3, 1e-6)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_once_the_costs_are_known_no_step_is_longer_than_the_bound(name: str) -> None:
    """A prompt of 2,000 tokens beside sequences that decode, on a machine that was at work before."""
    machine, bound = MACHINES[name], 0.2
    pace = PromptPace(256, bound)
    for _ in range(2):
        machine.read(pace, 1000, rows=0)
        machine.decode(pace, 20)
    steps = machine.read(pace, 2000, rows=12)
    one_row = machine.cost(2000, 1)
    assert max(seconds for seconds, _ in steps) <= bound + one_row
    # What the bound leaves is used, but for the last step and where the chunk is the bound, or nearly.
    used = [seconds for seconds, count in steps[:-1] if count < 224]
    assert all(seconds > 0.55 * bound for seconds in used), used


def test_the_costs_are_learnt_beside_sequences_that_decode() -> None:
    """The very first prompt comes while others decode: small steps first, and larger ones soon."""
    machine = MACHINES["fast"]
    pace = PromptPace(256, 0.05)
    machine.decode(pace, 10)
    steps = machine.read(pace, 2000, rows=12)
    assert steps[0][1] <= 16
    assert all(seconds <= 0.05 for seconds, _ in steps)
    assert len(steps) < 15


def test_a_machine_that_becomes_slower_or_faster_is_followed() -> None:
    pace, bound = PromptPace(256, 0.2), 0.2
    for factor in (1.0, 3.0, 1.0):
        machine = Machine(0.02 * factor, PromptCost(1e-3 * factor, 1e-7 * factor))
        machine.decode(pace, 10)
        machine.read(pace, 500, rows=8)
        steps = machine.read(pace, 2000, rows=8)
        late = [seconds for seconds, _ in steps[4:-1]]
        assert max(late) <= bound
        assert min(late) > bound / 2


def test_single_hiccups_change_little() -> None:
    """One step in twenty takes five times as long: the others still use most of the bound and hold it."""
    generator = random.Random(5)
    machine = Machine(0.03, PromptCost(1e-3, 1e-7), lambda: 5.0 if generator.random() < 0.05 else 1.0)
    pace = PromptPace(256, 0.2)
    for _ in range(3):
        machine.decode(pace, 20)
        steps = machine.read(pace, 4000, rows=8)
    calm = sorted(seconds for seconds, _ in steps[:-1])[: int(0.9 * len(steps))]
    assert calm[-1] <= 0.21
    assert calm[len(calm) // 2] > 0.1


@given(
    st.lists(
        st.tuples(_SECONDS, st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 512)), max_size=3), st.booleans()),
        max_size=40,
    )
)
def test_whatever_is_measured_estimates_stay_sound(measured: list[tuple[float, list[tuple[int, int]], bool]]) -> None:
    pace = PromptPace(256, 0.1)
    for seconds, spans, is_decoding in measured:
        pace.observe(seconds, spans, is_decoding=is_decoding)
    assert pace.decode_s is None or 0 < pace.decode_s < 100
    assert pace.cost is None or (0 <= pace.cost.row_s < 100 and 0 <= pace.cost.pair_s < 100)
    assert 16 <= pace.allowance(5).fit(100, 1000) <= 256
