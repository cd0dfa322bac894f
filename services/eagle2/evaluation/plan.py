"""What a bench is to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle2.evaluation.acceptance import Cell
from eagle2.evaluation.methods import PLAIN
from eagle2.evaluation.questions import QuestionSet
from eagle2.evaluation.trees import shape_name
from eagle2.speculative.draft import TreeShape


@dataclass(frozen=True, slots=True)
class Plan:
    """Methods (``plain`` comes by itself), trees and temperatures for every task.

    ``fast``: tau is measured by verifying only the nodes that plain decoding's answer goes through (``foresight``).
    ``speed_methods`` are timed with ``shapes`` too, on the first ``speed_limit`` questions, ``rounds`` times.
    """

    tasks: Sequence[QuestionSet]
    methods: Sequence[str]
    shapes: Sequence[TreeShape]
    temperatures: Sequence[float]
    max_tokens: int
    fast: bool = False
    speed_methods: Sequence[str] = ()
    speed_limit: int = 10
    rounds: int = 3

    def plain_cells(self) -> list[Cell]:
        return [Cell(temperature, task.task, PLAIN) for temperature in self.temperatures for task in self.tasks]

    def cells(self, temperature: float, method: str, shape: TreeShape) -> list[Cell]:
        return [Cell(temperature, task.task, method, shape_name(shape)) for task in self.tasks]

    def task(self, name: str) -> QuestionSet:
        return next(task for task in self.tasks if task.task == name)
