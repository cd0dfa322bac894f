"""Tau of every method on every task, many answers at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from eagle2.errors import Eagle2Error
from eagle2.evaluation.acceptance import Acceptance, Cell, same_cycles
from eagle2.evaluation.conversation import Turn, converse_all
from eagle2.evaluation.methods import EAGLE1, EAGLE2, PLAIN, policy_of
from eagle2.evaluation.observations import CalibrationRecorder
from eagle2.evaluation.plan import Plan
from eagle2.evaluation.prompts import PromptEncoder
from eagle2.evaluation.questions import Question
from eagle2.evaluation.ranks import RankCounter, probing_tree
from eagle2.evaluation.recalibration import calibration_report
from eagle2.evaluation.results import Results
from eagle2.evaluation.trees import ShapedEngine, shape_name
from eagle2.speculative.draft import TreeShape
from eagle2.training.progress import Progress

# Questions of each task whose answers EAGLE-1's tree is placed by.
_PROBES = 2
# What a turn costs beside one of plain decoding, roughly, for the time that is left.
_COST_OF_DRAFTING = 4


class TauMeasurement:
    """Measures the cells of a plan that ``results`` do not have yet, and adds each as it is done.

    ``recorder`` must watch the engine's link: EAGLE-2's trees of the first shape become the calibration.
    """

    def __init__(self, engine: ShapedEngine, plan: Plan, results: Results, recorder: CalibrationRecorder) -> None:
        self._engine, self._plan, self._results, self._recorder = engine, plan, results, recorder
        self._encoder = PromptEncoder(engine.description)
        self._progress = Progress("tau")
        self._done = self._total = 0

    async def run(self) -> None:
        """Raises ``Eagle2Error`` where an answer fails, or ``fast`` turns out to change a cycle."""
        plan = self._plan
        grid = [
            (t, method, shape, plan.cells(t, method, shape))
            for t in plan.temperatures
            for shape in plan.shapes
            for method in plan.methods
        ]
        cells = [*plan.plain_cells(), *(cell for *_, cells in grid for cell in cells)]
        self._total = sum(self._cost(cell) for cell in self._missing(cells))
        for cell in self._missing(plan.plain_cells()):
            await self._measure(cell)
        if EAGLE1 in {*plan.methods, *plan.speed_methods} and self._results.rates is None:
            await self._measure_rates()
        for temperature, method, shape, cells in grid:
            missing = self._missing(cells)
            if not missing:
                continue
            self._recorder.take()
            self._engine.use(shape, policy_of(method, self._results.rates))
            for cell in missing:
                await self._measure(cell)
            # Trees of a part of the tasks are not what the head's calibration is.
            observed = self._recorder.take()
            if method == EAGLE2 and shape == plan.shapes[0] and missing == cells and len(observed.steps()):
                report = {"tree": shape_name(shape), **calibration_report(observed)}
                self._results.add_calibration(temperature, report)
            if plan.fast:
                await self._check(missing[0])

    def _missing(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if cell not in self._results.acceptance]

    def _plain(self, temperature: float, task: str) -> Acceptance:
        return self._results.acceptance[Cell(temperature, task, PLAIN)]

    async def _measure(self, cell: Cell) -> None:
        began = time.monotonic()
        if cell.method != PLAIN and self._plan.fast:
            self._foretell(self._plain(cell.temperature, cell.task).turns)
        turns = await self._ask(self._plan.task(cell.task).questions, cell)
        self._foretell(())
        measured = Acceptance(cell, tuple(turns), time.monotonic() - began)
        self._results.add_acceptance(measured)
        if cell.method != PLAIN:
            self._progress.say(f"{cell.name}: tau {measured.tau:.3f} over {measured.cycles} cycles")

    async def _check(self, cell: Cell) -> None:
        """Whole trees on one question must give the cycles that foresight gave."""
        question = self._plan.task(cell.task).questions[0]
        whole = await self._converse([question], cell.temperature)
        fast = [turn for turn in self._results.acceptance[cell].turns if turn.question == question.name]
        if not same_cycles(whole, fast):
            raise Eagle2Error(f"Whole trees give other cycles on {question.name} than --fast does ({cell.name}).")

    async def _ask(self, questions: Sequence[Question], cell: Cell) -> list[Turn]:
        def on_turn(_: Turn) -> None:
            self._done += 1 if cell.method == PLAIN else _COST_OF_DRAFTING
            self._progress.show(self._done, self._total, cell.name)

        return await self._converse(questions, cell.temperature, speculation=cell.method != PLAIN, on_turn=on_turn)

    def _cost(self, cell: Cell) -> int:
        turns = sum(len(question.turns) for question in self._plan.task(cell.task).questions)
        return turns * (1 if cell.method == PLAIN else _COST_OF_DRAFTING)

    def _foretell(self, turns: Sequence[Turn]) -> None:
        if self._engine.foresight is not None:
            self._engine.foresight.foretell([(turn.prompt_ids, turn.token_ids) for turn in turns])

    async def _measure_rates(self) -> None:
        """Which ranks the target's tokens have, on a part of the questions, at the first temperature."""
        plan, foresight = self._plan, self._engine.foresight
        assert foresight is not None, "a static tree needs a draft head"
        depth = max(shape.depth for shape in plan.shapes)
        top_k = min(max(shape.top_k for shape in plan.shapes), self._engine.description.vocab_size)
        tree, counter = probing_tree(depth, top_k), RankCounter(top_k)
        self._engine.use(TreeShape(depth, top_k, len(tree.paths) + 1), tree)
        temperature = plan.temperatures[0]
        self._foretell([turn for task in plan.tasks for turn in self._plain(temperature, task.task).turns])
        foresight.watch = counter.watch
        questions = [question for task in plan.tasks for question in task.questions[:_PROBES]]
        await self._converse(questions, temperature)
        foresight.watch = None
        self._foretell(())
        self._results.add_rates(counter.rates(), counter.visits)
        self._progress.say(f"ranks of the target's tokens: nodes reached by depth {counter.visits}")

    async def _converse(
        self,
        questions: Sequence[Question],
        temperature: float,
        *,
        speculation: bool = True,
        on_turn: Callable[[Turn], None] = lambda _: None,
    ) -> list[Turn]:
        return await converse_all(
            self._engine.service,
            self._encoder,
            questions,
            self._plan.max_tokens,
            temperature,
            self._engine.settings.engine.max_sequences,
            speculation=speculation,
            on_turn=on_turn,
        )
