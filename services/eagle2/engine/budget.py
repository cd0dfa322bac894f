"""How many nodes a step drafts and verifies: as long as the expected tokens per second still rise.

Only numbers in, decisions out: whoever measures passes the seconds in, so the same measurements give the same
decisions. What is decided changes speed alone, never a token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from eagle2.engine.costs import DraftCost, DraftCosts, OwnCosts, StepCosts
from eagle2.engine.isotonic import Floats
from eagle2.engine.trials import Trials
from eagle2.engine.values import Booleans, Integers, NodeValues
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

_WINDOW, _FEWEST = 24, 8  # surveyed trees that a choice of shape rests on
# Of the time, what may go into looking at trees larger than those that pay: while some pay, and while none does, when
# nothing else shows what has become of drafting.
_SURVEY_SHARE, _PLAIN_SURVEY_SHARE = 0.01, 0.02
_SURVEY_STEPS = 16  # from one to the next at least
_DEBT = 8.0  # steps' time that a survey may have taken too much, at most
_SURVEYED = 4  # nodes of such a tree that are verified in any case, so that its values are put to the test
_CHOICE_STEPS = 16  # steps that a choice of shape holds for
_MARGIN = 1.01  # another shape must be this much better: two equal ones would take turns
# Whether there are trees at all is tried (``engine/trials.py``): costs that were taken apart leave out what the parts
# do to each other. Where nothing was tried yet, trees must be expected to gain so much: the best of many estimates is
# one that is too good. And where they are expected to lose so much, they are not tried.
_TREES_MARGIN, _HOPELESS = 1.05, 0.85
_TRIAL_SHARE, _TRIAL_MARGIN, _MEMORY, _EAGER = 0.02, 1.02, 300, 2
_MOST_PROMPTS = 0.25  # the part of a step beyond which prompts leave nothing to compare
_COARSE = 64  # rows of prompts and positions that make no difference to a choice


@dataclass(frozen=True, slots=True)
class Load:
    """A step's work before any tree: sequences that decode, those of them that take a tree, rows of prompts, and how
    many positions a decoding sequence's row sees, in the mean."""

    decoding: int
    drafting: int
    prompt_rows: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The trees of one step. ``shape`` None: none, everything is decoded plainly.

    alone: only the first sequence that takes a tree gets one. survey: drafted to learn, whether or not it pays.
    whole: ``shape`` is the largest one. draft_s: what trees are expected to take before they are verified, seconds.
    """

    shape: TreeShape | None
    alone: bool = False
    survey: bool = False
    whole: bool = False
    draft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftedNodes:
    """The drafted nodes (M,) of all trees of a step, tree after tree, roots left out.

    scores: natural logarithms of path probabilities. depths: from 1 on. parents: among these nodes and before the node,
    -1 for children of a root. trees: which tree a node is of.
    """

    scores: Floats
    depths: Integers
    parents: Integers
    trees: Integers


@dataclass(frozen=True, slots=True)
class _Choice:
    """Made at a step: the best option, and its tokens per second over those of plain decoding, as expected."""

    step: int
    option: int
    gain: float


def best_count(values: Floats, decoding: int, seconds: Floats) -> tuple[int, float]:
    """How many of the nodes are worth their time, and the tokens per second that they make.

    values (M,): chances to be accepted, descending. A step yields one token for each of ``decoding`` sequences and each
    accepted node. seconds (M + 1,): what the step takes with 0, 1, ... M nodes. The fewest of equally good counts.
    """
    rates = (decoding + np.concatenate([[0.0], np.cumsum(values)])) / seconds
    count = int(rates.argmax())
    return count, float(rates[count])


def needed_top_k(nodes: DraftedNodes) -> Integers:
    """The smallest top_k (M,) with which expansion would have drafted each node of a tree (one tree).

    A node must be among its parent's top_k children and its parent among its level's top_k nodes, all the way up.
    """
    index = np.arange(len(nodes.scores))
    among_level = _ranks(nodes.depths, np.lexsort((index, -nodes.scores, nodes.depths)))
    among_siblings = _ranks(nodes.parents, np.lexsort((index, -nodes.scores, nodes.parents)))
    needed = among_siblings + 1
    for node in index[nodes.parents >= 0].tolist():
        parent = nodes.parents[node]
        needed[node] = max(needed[node], needed[parent], among_level[parent] + 1)
    return needed


def _ranks(groups: Integers, order: Integers) -> Integers:
    """Places (M,) within groups, in ``order``, which has each group in one piece."""
    ordered = groups[order]
    new = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    begins = np.repeat(new, np.diff(np.concatenate([new, [len(order)]])))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - begins
    return ranks


class AdaptiveBudget:
    """Chooses depth and top_k before a step drafts, and the nodes that are verified after it has.

    ``bounds`` is the largest tree. ``verify`` is the cost of a step of the target, ``draft`` that of trees.

    Trees of the largest shape ("surveys") show what every smaller shape would have given. Where a smaller shape pays
    more, surveys go on as often as one per cent of the time allows, and two where none pays.
    """

    def __init__(self, bounds: TreeShape, verify: StepCosts, draft: DraftCosts) -> None:
        self.bounds, self.verify, self.draft = bounds, verify, draft
        self.own, self.values = OwnCosts(), NodeValues()
        self.trials = Trials(share=_TRIAL_SHARE, margin=_TRIAL_MARGIN, memory=_MEMORY, eager=_EAGER)
        widths = sorted({k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k < bounds.top_k} | {bounds.top_k})
        depths = range(1, bounds.depth + 1)
        self._options = [TreeShape(depth, k, bounds.num_nodes) for depth in depths for k in widths]
        self._depths = np.array([option.depth for option in self._options])
        self._widths = np.array([option.top_k for option in self._options])
        self._surveys: deque[tuple[DraftedNodes, Integers]] = deque(maxlen=_WINDOW)
        self._choices: dict[Load, _Choice] = {}
        self._current = len(self._options) - 1
        self._planned: StepPlan = StepPlan(None)
        self._gain = 1.0  # of trees over none, as expected at this step
        self._steps = self._surveyed = 0
        self._new_rows = 2.0  # of the draft head for each sequence of a step
        self._allowance_s = self._without_survey_s = 0.0

    def plan(self, load: Load) -> StepPlan:
        """What to draft. With nobody who drafts yet, what is going to be drafted for one sequence."""
        load = Load(
            max(load.decoding, 1),
            max(load.drafting, 1),
            -(-load.prompt_rows // _COARSE) * _COARSE,
            -(-load.context // _COARSE) * _COARSE,
        )
        self._planned = self._plan_for(load)
        return self._planned

    def _plan_for(self, load: Load) -> StepPlan:
        largest = len(self._options) - 1
        if len(self._surveys) < _FEWEST:
            return self._plan(load, largest, survey=True)
        choice = self._choice(load)
        self._gain = choice.gain
        has_trees = self.trials.is_other(load.decoding, starts_other=self._gain > _TREES_MARGIN)
        if load.prompt_rows:
            # No row is free beside a prompt. What trials found holds for steps that hardly read anything, at best.
            has_trees &= self._gain > _TREES_MARGIN and self.trials.judged(load.decoding) is True
        has_trees &= self._gain > _HOPELESS
        if has_trees and choice.option == largest:
            self._allowance_s = 0.0
            return self._plan(load, largest)
        survey = self._plan(load, largest, survey=True, alone=not has_trees)
        chosen = self._plan(load, choice.option) if has_trees else StepPlan(None)
        extra = survey.draft_s - chosen.draft_s
        if not has_trees:
            extra += self.verify.at(load.decoding + _SURVEYED, load.context)
            extra -= self.verify.at(load.decoding, load.context)
        if self._allowance_s < extra or self._steps - self._surveyed < _SURVEY_STEPS:
            return chosen
        self._surveyed = self._steps
        self._without_survey_s = chosen.draft_s + self.verify.at(load.decoding, load.context)
        return survey

    def keep(self, nodes: DraftedNodes, load: Load, plan: StepPlan) -> Booleans:
        """Which of the drafted nodes (M,) are verified. A node's parent is always among them."""
        values = self.values.of(nodes.scores, nodes.depths, nodes.parents)
        # A child is worth no more than its parent and stands behind it, so every beginning of this order is of trees.
        order = np.argsort(-values, kind="stable")
        seconds = plan.draft_s + self._step_s(load, np.arange(len(values) + 1, dtype=np.float64))
        count, _ = best_count(values[order], load.decoding, seconds)
        kept = np.zeros(len(values), np.bool_)
        kept[order[:count]] = True
        for tree in np.unique(nodes.trees).tolist() if plan.whole else ():
            mine = np.flatnonzero(nodes.trees == tree)
            first = mine[0]
            parents = np.where(nodes.parents[mine] < 0, -1, nodes.parents[mine] - first)
            one = DraftedNodes(nodes.scores[mine], nodes.depths[mine], parents, np.zeros(len(mine), np.int64))
            self._surveys.append((one, needed_top_k(one)))
            if plan.survey:
                kept[order[nodes.trees[order] == tree][:_SURVEYED]] = True
        return kept

    def observe_draft(self, cost: DraftCost, sequences: int) -> None:
        """Trees for so many sequences took so long."""
        self.draft.observe(cost)
        self._new_rows += 0.05 * (min(cost.new_rows / sequences, self.bounds.depth + 1.0) - self._new_rows)

    def end_step(self, rows: int, context: float, seconds: float, *, is_measure: bool) -> None:
        """The target's step of so many rows, which saw so many positions, took so long, all that follows included.

        is_measure: it tells what such steps take. One with a prompt does not, whose rows have no logits and cost less.
        """
        self._steps += 1
        self.values.step()
        self._allowance_s += (_PLAIN_SURVEY_SHARE if self._planned.shape is None else _SURVEY_SHARE) * seconds
        if is_measure:
            self.verify.observe(rows, context, seconds)

    def whole_step(self, load: Load, trees: int, tokens: int, seconds: float, *, prompt_s: float = 0.0) -> None:
        """The step as planned, with so many trees, took so long from its plan to its end and committed so many tokens
        of sequences that decode. ``prompt_s``: what its prompts are known to have taken of that."""
        plan, way = self._planned, None
        if plan.survey:  # what it took is paid for, whatever it was expected to take
            extra = max(seconds - prompt_s - self._without_survey_s, 0.0)
            self._allowance_s = max(self._allowance_s - extra, -_DEBT * self._without_survey_s)
        if not plan.survey and (trees > 0) == (plan.shape is not None) and prompt_s < _MOST_PROMPTS * seconds:
            way = trees > 0
        decoded_s = max(seconds - prompt_s, seconds / 10)
        self.trials.observe(way, load.decoding, tokens, decoded_s, may_try=self._gain > _HOPELESS)

    def export(self, stats: Recorder) -> None:
        """The choice, the costs and the calibration, as gauges."""
        shape = self._planned.shape
        stats.set(metrics.TREE_BUDGET_DEPTH, shape.depth if shape else 0)
        stats.set(metrics.TREE_BUDGET_TOP_K, shape.top_k if shape else 0)
        for curve, metric in (
            (self.verify.curve, metrics.TREE_BUDGET_VERIFY_SECONDS),
            (self.draft.curve, metrics.TREE_BUDGET_DRAFT_SECONDS),
        ):
            for size, seconds in zip(curve.sizes.tolist(), curve.seconds.tolist(), strict=True):
                stats.set(metric, seconds, rows=int(size))
        for edge, chance in self.values.table():
            stats.set(metrics.TREE_BUDGET_CALIBRATION, chance, drafted=edge)

    def _plan(self, load: Load, option: int, *, survey: bool = False, alone: bool = False) -> StepPlan:
        shape = self._options[option]
        sequences = 1 if alone else load.drafting
        draft_s = self.draft.at(self._new_rows * sequences, shape.depth, shape.top_k * sequences)
        draft_s += self.own.tree_s * sequences
        return StepPlan(shape, alone, survey, option == len(self._options) - 1, draft_s)

    def _choice(self, load: Load) -> _Choice:
        known = self._choices.get(load)
        if known is not None and self._steps - known.step < _CHOICE_STEPS:
            return known
        plain, rates = self._rates(load)
        best = int(rates.argmax())
        if rates[best] > _MARGIN * rates[self._current]:
            self._current = best
        if len(self._choices) > 256:
            self._choices.clear()
        choice = _Choice(self._steps, self._current, float(rates[self._current]) / plain)
        self._choices[load] = choice
        return choice

    def _rates(self, load: Load) -> tuple[float, Floats]:
        """Tokens per second of plain decoding, and of every option with the nodes that it pays to verify.

        Every ``drafting`` sequence is taken to have the surveyed trees' nodes, each of them by one part of them all.
        """
        values = np.concatenate([self.values.of(n.scores, n.depths, n.parents) for n, _ in self._surveys])
        depths = np.concatenate([n.depths for n, _ in self._surveys])
        widths = np.concatenate([needed for _, needed in self._surveys])
        order = np.argsort(-values, kind="stable")
        share = load.drafting / len(self._surveys)
        drafted = (depths[order] <= self._depths[:, None]) & (widths[order] <= self._widths[:, None])
        tokens = load.decoding + share * np.cumsum(np.where(drafted, values[order], 0.0), axis=1)
        draft_s = self.draft(
            self._new_rows * load.drafting, self._depths.astype(np.float64), self._widths * float(load.drafting)
        )
        draft_s = draft_s + self.own.tree_s * load.drafting
        verified: Floats = np.cumsum(drafted, axis=1, dtype=np.float64)
        seconds = draft_s[:, None] + self._step_s(load, share * verified)
        plain = load.decoding / float(self._step_s(load, np.zeros(1))[0])
        return plain, (tokens / seconds).max(axis=1, initial=0.0)

    def _step_s(self, load: Load, nodes: Floats) -> Floats:
        """Seconds (...) of the target's step with so many nodes (...) beside ``load``, its prompts left out.

        What prompts take is taken in any case, now or later, so it speaks for no node: a node pays when it yields more
        by its own time than decoding does without it. That time is what it costs behind the rows of the prompts, where
        arithmetic counts and not the reading of weights.
        """
        rows = load.decoding + load.prompt_rows
        added: Floats = self.verify(rows + nodes, load.context) - self.verify.at(rows, load.context)
        return self.verify.at(load.decoding, load.context) + added
