"""A fixed number of clients, each of which asks the next question as soon as it has its answer."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from eagle2.evaluation.load.trace import Answer, Clock, Reading, Trace, ask
from eagle2.evaluation.measure import bench_request
from eagle2.protocol import Verifier


async def closed_loop(
    verifier: Verifier,
    prompts: Mapping[str, Sequence[int]],
    concurrency: int,
    max_tokens: int,
    window_tokens: int,
    read: Callable[[], Reading],
    *,
    speculation: bool = True,
    clock: Clock = time.perf_counter,
) -> Trace:
    """Keep ``concurrency`` sequences running and measure ``window_tokens`` tokens of them, then cut them off.

    The window opens when every client has the first token of its first answer. The clients' first answers are of
    different lengths, evenly spread up to ``max_tokens``, so that answers end one by one as they do in a load that
    has gone on for long. Prompts (ids by name) are asked in turn, again from the first one when all were asked.

    Raises ``Eagle2Error`` where an answer fails.
    """
    load = _ClosedLoop(concurrency, window_tokens, read)
    turn = itertools.cycle(prompts.items())

    async def client(number: int) -> None:
        tokens = -(-max_tokens * (number + 1) // concurrency)
        while True:
            name, ids = next(turn)
            answer = Answer(name, due=clock())
            load.answers.append(answer)
            request = bench_request(ids, tokens, speculation=speculation, name=f"load-{len(load.answers)}")
            await ask(verifier, request, answer, clock, load.on_commit)
            tokens = max_tokens

    clients = [asyncio.create_task(client(number)) for number in range(concurrency)]
    end = asyncio.create_task(load.ended.wait())
    try:
        # A client ends by an error alone.
        done, _ = await asyncio.wait([end, *clients], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (end, *clients):
            task.cancel()
        await asyncio.gather(end, *clients, return_exceptions=True)
    assert load.begin is not None
    assert load.end is not None
    return Trace(load.answers, load.begin, load.end)


class _ClosedLoop:
    """Opens and closes the window as tokens come."""

    def __init__(self, concurrency: int, window_tokens: int, read: Callable[[], Reading]) -> None:
        self._concurrency, self._left, self._read = concurrency, window_tokens, read
        self.answers: list[Answer] = []
        self.begin: Reading | None = None
        self.end: Reading | None = None
        self.ended = asyncio.Event()

    def on_commit(self, answer: Answer) -> None:
        if self.begin is None:
            if len(self.answers) >= self._concurrency and all(a.commits for a in self.answers[: self._concurrency]):
                self.begin = self._read()
        elif self.end is None:
            self._left -= answer.commits[-1][1]
            if self._left <= 0:
                self.end = self._read()
                self.ended.set()
