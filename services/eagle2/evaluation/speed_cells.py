"""How many times as fast as plain decoding each method is on a task: one request at a time, in interleaved rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median
from typing import Any

from eagle2.evaluation.acceptance import Cell
from eagle2.evaluation.methods import PLAIN, policy_of
from eagle2.evaluation.plan import Plan
from eagle2.evaluation.results import Results
from eagle2.evaluation.speed import Run, differences, measure_speed, ratio, speed_of
from eagle2.evaluation.systems import system_of
from eagle2.evaluation.trees import ShapedEngine, shape_name
from eagle2.speculative.draft import TreeShape
from eagle2.training.progress import Progress

_Systems = dict[str, tuple[str, TreeShape]]


class SpeedMeasurement:
    """Times the methods of a plan on the tasks that ``results`` have no times of, and adds each task as it is done.

    The turns are those of plain decoding's conversations, which must be among the results.
    """

    def __init__(self, engine: ShapedEngine, plan: Plan, results: Results) -> None:
        self._engine, self._plan, self._results = engine, plan, results

    def run(self, runner: asyncio.Runner) -> None:
        """Raises ``Eagle2Error`` where an answer fails."""
        plan = self._plan
        drafting = {f"{m} {shape_name(shape)}": (m, shape) for m in plan.speed_methods for shape in plan.shapes}
        for temperature in plan.temperatures if drafting else ():
            for task in plan.tasks:
                stored = self._results.speed.get((temperature, task.task), {"rows": []})
                if set(drafting) - {f"{row['method']} {row['tree']}" for row in stored["rows"]}:
                    self._results.add_speed(
                        temperature, task.task, self._race(runner, temperature, task.task, drafting)
                    )

    def _race(self, runner: asyncio.Runner, temperature: float, task: str, drafting: _Systems) -> dict[str, Any]:
        plan = self._plan
        asked = {question.name for question in plan.task(task).questions[: plan.speed_limit]}
        plain = self._results.acceptance[Cell(temperature, task, PLAIN)]
        prompts = {turn.name: turn.prompt_ids for turn in plain.turns if turn.question in asked}
        systems = {PLAIN: system_of(runner, self._engine, None, temperature=temperature)}
        for name, (method, shape) in drafting.items():
            policy = policy_of(method, self._results.rates)
            systems[name] = system_of(runner, self._engine, shape, policy, temperature)
        progress = Progress(f"speed at temperature {temperature:g}, {task}")
        done = 0

        def say(text: str) -> None:
            nonlocal done
            # A system's warm-up is said too, and is no prompt.
            done += text.startswith("round")
            progress.show(done, len(prompts) * plan.rounds, text)

        runs = measure_speed(systems, prompts, plan.max_tokens, plan.rounds, say)
        return race_json(runs, drafting, temperature, task)


def race_json(runs: Sequence[Run], drafting: _Systems, temperature: float, task: str) -> dict[str, Any]:
    """A row for each system beside plain decoding, and the answers that have other tokens than it.

    Rates are tokens per second behind the first one, medians over the rounds; ``times_plain`` is the median of the
    ratios within a round.
    """
    plain = speed_of(PLAIN, runs)
    rows, lost = [], []
    for name, (method, shape) in drafting.items():
        speed = speed_of(name, runs)
        key = {"temperature": temperature, "task": task, "method": method, "tree": shape_name(shape)}
        rows.append(
            {
                **key,
                "times_plain": ratio(speed, plain),
                "decode_rate": median(speed.decode_rates),
                "plain_decode_rate": median(plain.decode_rates),
                "decode_rates": list(speed.decode_rates),
                "plain_decode_rates": list(plain.decode_rates),
                "tau": speed.tau,
                "answers": sum(run.system == name for run in runs),
            }
        )
        lost += [{**key, "turn": d.prompt, "position": d.position} for d in differences(name, PLAIN, runs)]
    return {"rows": rows, "lost": lost}
