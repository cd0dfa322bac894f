"""An engine whose trees are chosen by cost: the same tokens whatever is chosen, and decisions that follow the costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from eagle2.config import EngineSettings, Settings
from eagle2.engine.assemble import adaptive_budget
from eagle2.engine.budget import AdaptiveBudget
from eagle2.engine.costs import CostCurve, DraftCosts, StepCosts, sizes_up_to
from eagle2.engine.engine import Engine, EngineLimits
from eagle2.engine.measuring import measure_pair, measure_target
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.text.tokenizer import Tokenizer
from eagle2.transport.base import DraftHandler
from fakes.drafts import OracleHandler, RandomHandler
from fakes.engines import EOS, INCARNATION, PROMPTS, EngineKit, draft_head, plain, request
from fakes.verifier import byte_tokenizer_json

BOUNDS = TreeShape(4, 4, 20)


class Clock:
    """Seconds that pass by themselves at every look: any length of time, the same in every run."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += float(self._random.uniform(0.001, 0.05))
        return self._now


def flat(_: float) -> float:
    return 0.02


def steep(rows: float) -> float:
    return 0.02 * rows


class AdaptiveKit(EngineKit):
    """An ``EngineKit`` with a budget whose first idea of the costs is ``verify`` and ``draft``."""

    def __init__(
        self,
        handler: DraftHandler | None,
        verify: Callable[[float], float],
        draft: Callable[[float], float] = lambda _: 0.001,
        *,
        clock: Callable[[], float] | None = None,
        dtype: torch.dtype = torch.float32,
        num_slots: int = 4096,
    ) -> None:
        super().__init__(handler, dtype=dtype, num_slots=num_slots)
        sizes = sizes_up_to(8 * BOUNDS.num_nodes)
        self.budget = AdaptiveBudget(
            BOUNDS,
            StepCosts(CostCurve(sizes, [verify(size) for size in sizes])),
            DraftCosts(CostCurve(sizes, [draft(size) for size in sizes])),
        )
        self.engine = Engine(
            self.target,
            Tokenizer(byte_tokenizer_json()),
            self.pair,
            self.stats,
            EngineLimits(512, 8, 64),
            BOUNDS,
            frozenset({EOS}),
            budget=self.budget,
            clock=clock or itertools.count().__next__,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0, "seed": 42}, {"temperature": 0.8, "seed": 3, "frequency_penalty": 1.1}],
    ids=str,
)
def test_the_same_tokens_whatever_the_costs(dtype: torch.dtype, sampling: dict[str, object]) -> None:
    """Greedy and seeded, a batch of several; drafting pays always, never, or is anybody's guess."""
    requests = [request(p, max_tokens=40, ignore_eos=i % 2 == 0, **sampling) for i, p in enumerate(PROMPTS)]
    expected = [answer.ids for answer in EngineKit(None, dtype=dtype).answers(*requests)]
    for verify in (flat, steep):
        kit = AdaptiveKit(draft_head(dtype=dtype), verify, clock=Clock(1), dtype=dtype)
        assert [answer.ids for answer in kit.answers(*requests)] == expected
        off = kit.answers(*(plain(one) for one in requests[:3]), *requests[3:])
        assert [answer.ids for answer in off] == expected
    kit = AdaptiveKit(RandomHandler(3, 258, incarnation=INCARNATION), flat, clock=Clock(2), dtype=dtype)
    assert [answer.ids for answer in kit.answers(*requests)] == expected


def test_the_same_tokens_when_slots_run_out() -> None:
    requests = [request(p, max_tokens=60, ignore_eos=True) for p in PROMPTS]
    expected = [answer.ids for answer in EngineKit(None).answers(*requests)]
    kit = AdaptiveKit(draft_head(num_slots=700), flat, clock=Clock(3), num_slots=600)
    answers = [kit.submit(one) for one in requests]
    kit.run()
    assert [answer.ids for answer in answers] == expected


def test_the_same_times_give_the_same_steps() -> None:
    requests = [request(p, max_tokens=50, ignore_eos=True) for p in PROMPTS[:4]]

    def run() -> tuple[list[list[int]], dict[str, float]]:
        kit = AdaptiveKit(draft_head(), flat, clock=Clock(8))
        answers = kit.answers(*requests)
        snapshot = kit.stats.snapshot()
        budget = {key: value for key, value in snapshot.items() if key.startswith(("tree_budget", "spec_decode"))}
        return [[len(commit.token_ids) for commit in answer.commits] for answer in answers], budget

    first, second = run(), run()
    assert first == second
    assert first[1]["tree_budget_surveys_total"] > 0


class Costs:
    """A clock that the engine's own work moves: verified rows and drafting take what they are said to take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(kit: AdaptiveKit, clock: Costs, verify: Callable[[float], float], draft_s: Callable[[], float]) -> None:
    """Make the kit's forwards and drafts take time on the clock."""
    forward, ask = kit.target.forward, kit.pair.ask

    def slow_forward(rows):  # type: ignore[no-untyped-def]
        clock.now += verify(len(rows.tokens))
        return forward(rows)

    def slow_ask(entries, shape):  # type: ignore[no-untyped-def]
        clock.now += draft_s()
        return ask(entries, shape)

    kit.target.forward = slow_forward  # type: ignore[method-assign]
    kit.pair.ask = slow_ask  # type: ignore[method-assign]


def test_drafts_that_are_always_right_become_deep_chains() -> None:
    one = request(PROMPTS[0], max_tokens=300, ignore_eos=True)
    expected = EngineKit(None).answer(one).ids
    text = [*one.prompt_ids, *expected]
    oracle = OracleHandler(lambda context: text[len(context) :], incarnation=INCARNATION)
    clock = Costs()
    kit = AdaptiveKit(oracle, flat, clock=clock)
    timed(kit, clock, flat, lambda: 0.001)
    answer = kit.answer(one)
    assert answer.ids == expected
    assert answer.usage.cycles < 300 / 4
    assert kit.stats.get(metrics.TREE_BUDGET_DEPTH) == BOUNDS.depth


def test_drafts_that_are_never_right_are_given_up() -> None:
    one = request(PROMPTS[0], max_tokens=400, ignore_eos=True)
    expected = EngineKit(None).answer(one).ids
    clock = Costs()
    kit = AdaptiveKit(RandomHandler(1, 258, incarnation=INCARNATION), steep, clock=clock)
    timed(kit, clock, lambda rows: 0.01 + 0.01 * rows, lambda: 0.02)
    answer = kit.answer(one)
    assert answer.ids == expected
    assert kit.stats.get(metrics.TREE_BUDGET_PLAIN_STEPS) > 300
    assert kit.stats.get(metrics.TREE_BUDGET_SURVEYS) > 8, "it looks again now and then"
    assert kit.stats.get(metrics.TREE_BUDGET_DEPTH) == 0
    assert kit.stats.get(metrics.TREE_BUDGET_PRUNED) > 0


def test_an_idle_pair_is_asked_what_trees_take() -> None:
    clock = Costs()
    kit = AdaptiveKit(draft_head(), flat, clock=clock)
    timed(kit, clock, flat, lambda: 0.05)
    assert not kit.engine.step()
    kit.check_idle()
    assert kit.budget.draft.at(1, BOUNDS.depth, BOUNDS.top_k) == pytest.approx(0.05, rel=0.1)
    assert kit.budget.draft.at(8, BOUNDS.depth, 8 * BOUNDS.top_k) == pytest.approx(0.05, rel=0.1)


def test_what_is_measured_leaves_nothing_behind() -> None:
    kit = EngineKit(draft_head())
    costs_of = measure_target(kit.target, 30)
    sizes = sizes_up_to(30, kit.target.model.row_tiles)
    assert set(sizes) <= set(costs_of.curve.sizes.tolist())
    assert (costs_of.curve.seconds > 0).all()
    costs = measure_pair(kit.pair, kit.target, BOUNDS, 3)
    assert {(cost.depth, cost.beam_rows) for cost in costs} >= {(1, 4), (4, 1), (4, 2), (4, 4), (1, 12), (4, 12)}
    kit.check_idle()
    small = EngineKit(None, num_slots=40)
    assert measure_target(small.target, 64).curve.sizes[-1] <= 30


def test_trees_that_a_proposer_has_no_room_for_tell_no_cost() -> None:
    kit = EngineKit(draft_head(num_slots=4))
    costs = measure_pair(kit.pair, kit.target, BOUNDS, 2)
    assert {(cost.new_rows, cost.depth, cost.beam_rows) for cost in costs} == {(1, 1, 4), (1, 4, 1), (2, 1, 8)}


def test_settings_make_a_budget() -> None:
    kit = EngineKit(None)
    engine = EngineSettings(max_sequences=2, depth=3, top_k=4, num_draft_tokens=7, tree_budget="adaptive")
    budget = adaptive_budget(Settings(engine=engine), kit.target)
    assert budget.bounds == TreeShape(3, 4, 8)
    assert budget.verify.curve.sizes[-1] >= 16
    kit.check_idle()
