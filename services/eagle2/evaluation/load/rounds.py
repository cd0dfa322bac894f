"""All contenders under all loads, in interleaved rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eagle2.evaluation.load.cells import Cell, Load, cell_of
from eagle2.evaluation.load.closed_loop import closed_loop
from eagle2.evaluation.load.contenders import Contender, LoadedEngine, LoadedEngines
from eagle2.evaluation.load.open_loop import open_loop, poisson_arrivals
from eagle2.evaluation.load.texts import Texts
from eagle2.evaluation.load.trace import Reading, Trace
from eagle2.evaluation.measure import wait_until_paired
from eagle2.telemetry import metrics

_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is measured.

    answers: how many whole answers' tokens a window has at least; it never has fewer than half a one for each sequence.
    arrivals: requests of an open loop.
    """

    contenders: Sequence[Contender]
    loads: Sequence[Load]
    prompts: Mapping[str, Sequence[int]]
    rounds: int
    max_tokens: int
    answers: int
    arrivals: int

    def window_tokens(self, concurrency: int) -> int:
        return self.max_tokens * max(concurrency, 2 * self.answers) // 2


class LoadMeasurement:
    """Measures a plan. ``cells`` are those of whole rounds; ``texts`` knows whether all gave the same tokens."""

    def __init__(self, engines: LoadedEngines, plan: LoadPlan, say: Callable[[str], None]) -> None:
        self._engines, self._plan, self._say = engines, plan, say
        self.cells: list[Cell] = []
        self.texts = Texts()

    async def run(self, on_round: Callable[[], object] = lambda: None) -> None:
        """Measure all rounds; ``on_round`` is called after each.

        Round 0 is run like the others, with windows half as long, and is not among the cells.

        In it kernels are compiled, and an adaptive budget measures its costs and learns from trees under every load.
        Within a round all contenders meet one load right after another, with the same prompts and arrivals; who comes
        first moves on with every load and every round. Raises ``Eagle2Error`` where an answer fails.
        """
        plan = self._plan
        for contender in plan.contenders:
            if contender.shape is not None:
                await wait_until_paired(self._engines[contender.name].service)
        began = time.monotonic()
        for number in range(plan.rounds + 1):
            cells: list[Cell] = []
            for place, load in enumerate(plan.loads):
                first = (number + place) % len(plan.contenders)
                met = [
                    await self._cell(contender, load, number)
                    for contender in (*plan.contenders[first:], *plan.contenders[:first])
                ]
                rates = "  ".join(f"{cell.contender} {cell.rate:.1f}" for cell in sorted(met, key=_name))
                title = f"round {number}/{plan.rounds}" if number else "warm-up"
                self._say(f"{title}, {load.name}: {rates} tok/s ({time.monotonic() - began:.0f} s so far)")
                cells += met
            if number:
                self.cells += cells
                on_round()

    async def _cell(self, contender: Contender, load: Load, number: int) -> Cell:
        plan, engine = self._plan, self._engines[contender.name]
        prompts = rotated(plan.prompts, number * len(plan.prompts) // (plan.rounds + 1))

        def read() -> Reading:
            return Reading(time.perf_counter(), engine.cpu_s(), engine.metrics())

        speculation = contender.shape is not None
        trace: Trace
        if load.concurrency is not None:
            window = plan.window_tokens(load.concurrency) // (1 if number else 2)
            trace = await closed_loop(
                engine.service, prompts, load.concurrency, plan.max_tokens, window, read, speculation=speculation
            )
        else:
            assert load.rate is not None
            arrivals = poisson_arrivals(load.rate, plan.arrivals, seed=number)
            trace = await open_loop(engine.service, prompts, arrivals, plan.max_tokens, read, speculation=speculation)
        await _until_idle(engine)
        self.texts.compare(contender.name, load, number, trace.answers)
        return cell_of(contender.name, load, number, trace)


async def _until_idle(engine: LoadedEngine) -> None:
    """What was cut off is still in the batch until the next step; the next contender is to have the machine alone."""
    keys = [metric.sample() for metric in (metrics.NUM_REQUESTS_RUNNING, metrics.NUM_REQUESTS_WAITING)]
    while True:
        stats = await engine.service.stats()
        if not any(stats.get(key) for key in keys):
            return
        await asyncio.sleep(_POLL_S)


def _name(cell: Cell) -> str:
    return cell.contender


def rotated(prompts: Mapping[str, Sequence[int]], by: int) -> dict[str, Sequence[int]]:
    """The same prompts from the ``by``-th on, those before it at the end."""
    items = list(prompts.items())
    by %= len(items)
    return dict(items[by:] + items[:by])
