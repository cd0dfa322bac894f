"""Which trees a step has: those that are set, or those that the budget finds worth their time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from eagle2.engine.budget import AdaptiveBudget, Load, StepPlan
from eagle2.engine.costs import DraftCost
from eagle2.engine.measuring import measure_pair
from eagle2.engine.pair import Pair
from eagle2.engine.sequence import Sequence as Generation
from eagle2.engine.target import TargetRunner
from eagle2.engine.trees import Forest
from eagle2.engine.values import Booleans
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.transport.messages import DraftEntry, DraftStatus, DraftTree

_EXPORT_STEPS = 32
_KNOWN_ROWS = 8  # head rows of a sequence beyond which a step brings the proposer up to date, and tells no cost


class FixedTrees:
    """Every sequence has a tree of one shape at every step. Also what the engine asks of any choice.

    In the order of a step: ``begin``, ``is_wanted`` for each sequence, ``drafted``, ``pruned``, ``judged``,
    ``verified``. ``idle`` is called instead when nothing is to be done.
    """

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape

    def begin(self, running: Sequence[Generation], prompt_rows: int) -> None:
        """A step with a proposer begins: choose ``shape``. ``prompt_rows``: tokens of prompts that it is to read."""

    def is_wanted(self, sequence: Generation) -> bool:  # noqa: ARG002
        """Whether the proposer is asked about a sequence at this step: for a tree, or to keep up."""
        return True

    def drafted(
        self, entries: Sequence[DraftEntry], trees: Mapping[tuple[int, int], DraftTree], seconds: float
    ) -> None:
        """What was asked, what came back, and how long that took."""

    def pruned(self, trees: Forest) -> Forest:
        """The trees that are verified, of those of all decoding sequences, roots alone among them."""
        return trees

    def judged(self, trees: Forest, accepted: Booleans) -> None:
        """The trees that were verified, and which of their nodes (M,) lie on accepted paths; roots do."""

    def verified(self, rows: int, seconds: float, *, prompt_s: float, is_alone: bool) -> None:
        """The step's forward of so many rows and what followed from it took so long.

        prompt_s: what its prompts took of that, as far as is known: 0 without any, infinite where nobody knows yet.
        is_alone: nothing was drafted meanwhile, which takes time from both.
        """

    def idle(self, pair: Pair, target: TargetRunner) -> None:
        """Nothing is to be done."""


class AdaptiveTrees(FixedTrees):
    """Trees as the budget has them. ``max_sequences`` bounds what is measured in the first idle moment of a pair."""

    def __init__(
        self,
        budget: AdaptiveBudget,
        stats: Recorder,
        max_sequences: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(budget.bounds)
        self.budget = budget
        self._stats, self._max_sequences, self._clock = stats, max_sequences, clock
        self._plan, self._load = StepPlan(None), Load(1, 1)
        self._has_asked = False  # at this step, for a tree
        self._began: float | None = None  # this step
        self._draft_s, self._num_trees, self._num_accepted = 0.0, 0, 0  # of this step
        self._steps = 0
        self._is_measured = False

    def begin(self, running: Sequence[Generation], prompt_rows: int) -> None:
        self._began, self._draft_s, self._num_trees, self._num_accepted = self._clock(), 0.0, 0, 0
        decoding = [sequence for sequence in running if sequence.decodes]
        drafting = sum(sequence.speculate and sequence.num_left > 1 for sequence in decoding)
        self._load = Load(len(decoding), drafting, prompt_rows, _mean_context(decoding))
        self._plan = self.budget.plan(self._load)
        self.shape = self._plan.shape or self.budget.bounds
        self._has_asked = False
        if drafting:
            self._stats.add(metrics.TREE_BUDGET_PLAIN_STEPS, self._plan.shape is None)
            self._stats.add(metrics.TREE_BUDGET_SURVEYS, self._plan.survey)

    def is_wanted(self, sequence: Generation) -> bool:
        if self._plan.shape is None:
            return False
        if not self._plan.alone:
            return True
        first = not self._has_asked and sequence.decodes and sequence.num_left > 1
        self._has_asked |= first
        return first

    def drafted(
        self, entries: Sequence[DraftEntry], trees: Mapping[tuple[int, int], DraftTree], seconds: float
    ) -> None:
        sequences = sum(entry.draft for entry in entries)
        self._draft_s, self._num_trees = seconds, sequences
        rows = sum(len(entry.tokens) for entry in entries)
        sound = len(trees) == len(entries) and all(
            tree.status in (DraftStatus.OK, DraftStatus.SYNCED) for tree in trees.values()
        )
        if sequences and sound and sequences == len(entries) and rows <= _KNOWN_ROWS * sequences:
            beam = sequences * self.shape.top_k
            self.budget.observe_draft(DraftCost(rows, self.shape.depth, beam, seconds), sequences)

    def pruned(self, trees: Forest) -> Forest:
        nodes = trees.drafted()
        if not len(nodes.scores):
            return trees
        kept = self.budget.keep(nodes, self._load, self._plan)
        self._stats.add(metrics.TREE_BUDGET_PRUNED, int(len(kept) - kept.sum()))
        return trees.with_nodes(kept)

    def judged(self, trees: Forest, accepted: Booleans) -> None:
        is_drafted = trees.depths > 0
        self._num_accepted = int(accepted[is_drafted].sum())
        self.budget.values.observe(trees.scores[is_drafted], trees.depths[is_drafted], accepted[is_drafted])

    def verified(self, rows: int, seconds: float, *, prompt_s: float, is_alone: bool) -> None:
        self.budget.end_step(rows, self._load.context, seconds, is_measure=is_alone and not prompt_s)
        # Without a proposer no step begins here, and one that only reads prompts decides nothing.
        if is_alone and self._began is not None and self._load.decoding:
            whole, self._began = self._clock() - self._began, None
            tokens = self._load.decoding + self._num_accepted
            self.budget.whole_step(self._load, self._num_trees, tokens, whole, prompt_s=prompt_s)
            self.budget.own.observe(self._num_trees, max(whole - self._draft_s - seconds, 0.0))
        self._steps += 1
        if self._steps % _EXPORT_STEPS == 1:
            self.budget.export(self._stats)

    def idle(self, pair: Pair, target: TargetRunner) -> None:
        if self._is_measured or not pair.is_up:
            return
        self._is_measured = True
        self.budget.draft.fit(measure_pair(pair, target, self.budget.bounds, self._max_sequences, clock=self._clock))
        self.budget.export(self._stats)


def _mean_context(decoding: Sequence[Generation]) -> int:
    return sum(len(sequence.table) for sequence in decoding) // max(len(decoding), 1)
