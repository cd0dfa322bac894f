"""Requests that arrive when they arrive, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence

from eagle2.evaluation.load.trace import Answer, Clock, Reading, Trace, ask
from eagle2.evaluation.measure import bench_request
from eagle2.protocol import Verifier


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which ``count`` requests arrive, ``rate`` a second on average, independently."""
    random_source = random.Random(seed)
    return list(itertools.accumulate(random_source.expovariate(rate) for _ in range(count)))


async def open_loop(
    verifier: Verifier,
    prompts: Mapping[str, Sequence[int]],
    arrivals: Sequence[float],
    max_tokens: int,
    read: Callable[[], Reading],
    *,
    speculation: bool = True,
    clock: Clock = time.perf_counter,
) -> Trace:
    """Send a request at each of ``arrivals`` (seconds from the start) and wait for all answers.

    Prompts (ids by name) are asked in turn. Raises ``Eagle2Error`` where an answer fails.
    """
    turn = itertools.cycle(prompts.items())
    answers: list[Answer] = []

    async def client(due: float, name: str, ids: Sequence[int]) -> None:
        answer = Answer(name, due=due)
        answers.append(answer)
        request = bench_request(ids, max_tokens, speculation=speculation, name=f"load-{len(answers)}")
        await ask(verifier, request, answer, clock, lambda _: None)

    begin = read()
    async with asyncio.TaskGroup() as clients:
        for arrival in arrivals:
            due = begin.time + arrival
            await asyncio.sleep(max(0.0, due - clock()))
            clients.create_task(client(due, *next(turn)))
    return Trace(answers, begin, read())
