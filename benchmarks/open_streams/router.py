"""One router as it is served, in a process of its own, before replicas that say the time at a steady pace.

Writes its port as the first line; when its input closes, how late its event loop was as the second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncIterator

import uvicorn
from tokenizers import Tokenizer, models

from eagle2.protocol import Commit, GenerationRequest, ModelDescription, Replica, Usage
from eagle2.router.api import create_app
from eagle2.router.settings import RouterSettings

_REPLICAS = 4
_TICK_S = 0.02


class SteadyFleet:
    """Replicas without a model: every ``pace_s`` an item whose text is the monotonic time in nanoseconds."""

    def __init__(self, max_sequences: int, pace_s: float, *, aligned: bool) -> None:
        """``aligned``: all streams have their items at the same moments, the worst that can happen."""
        self._replicas = tuple(Replica(f"r{i}", f"r{i}.1", max_sequences) for i in range(_REPLICAS))
        self._pace_s, self._aligned = pace_s, aligned

    def replicas(self) -> tuple[Replica, ...]:
        return self._replicas

    async def generate(self, replica: Replica, request: GenerationRequest) -> AsyncIterator[Commit]:
        del replica
        yield Commit((), "")
        due = time.monotonic()
        if self._aligned:
            due += self._pace_s - due % self._pace_s
        count = request.stop.max_tokens
        for item in range(1, count + 1):
            await asyncio.sleep(due - time.monotonic())
            last = item == count
            usage = Usage(len(request.prompt_ids), count, 0, 0, 0, count) if last else None
            yield Commit((1,), f" {time.monotonic_ns()}", "length" if last else None, usage)
            due += self._pace_s

    async def describe(self) -> ModelDescription:
        words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str()
        return ModelDescription("steady", 0, 2, 1 << 20, "float32", words, None, None, None, (), speculation=False)

    async def stats(self) -> dict[str, float]:
        return {}


async def _measure_lag(samples: list[tuple[float, float]]) -> None:
    while True:
        due = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        samples.append((due, time.monotonic() - due))


async def _serve(arguments: argparse.Namespace) -> None:
    places = -(-arguments.streams // _REPLICAS)
    fleet = SteadyFleet(places, arguments.pace, aligned=arguments.aligned)
    # The queue is not what is measured: there is a place for everybody.
    app = create_app(fleet, RouterSettings())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=2))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - there is nothing else to wait for
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    lags: list[tuple[float, float]] = []
    measuring = asyncio.create_task(_measure_lag(lags))
    await asyncio.to_thread(sys.stdin.read)
    measuring.cancel()
    assert "torch" not in sys.modules, "a router must not load torch"
    print(json.dumps(lags), flush=True)
    server.should_exit = True
    await serving


def main() -> None:
    parser = argparse.ArgumentParser(description="One router before replicas that say the time.")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True)
    parser.add_argument("--aligned", action="store_true")
    parser.add_argument("--loop", choices=["auto", "asyncio", "uvloop"], default="auto")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    factory = uvicorn.Config(None, loop=arguments.loop).get_loop_factory()  # type: ignore[arg-type]
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(arguments))


if __name__ == "__main__":
    main()
