"""Conversations on several replicas behind two routers: how much of their history is found in a cache.

    python benchmarks/affinity.py [--chats 40] [--turns 5] [--at-once 8] [--replicas 4] [--kv-slots 32768] [--seed 0]

The replicas are engines with a small random target each, in this process, with prefix caches; the two routers share one
session store and take turns within a chat. Every turn sends the whole history and a new question. Compared are
``routing.affinity`` "session", the same with chats that give no name (their prefixes are all that is known), and
"random", each with fresh replicas: once with openings of their own, once with a long system prompt that all share.
Counts do not depend on how fast the machine is. What is printed is a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from eagle2.config import AdmissionSettings, RoutingSettings, Settings, load_settings
from eagle2.engine.assemble import build_engine, describe, load_checkpoint
from eagle2.engine.engine import Engine
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.report import conditions_lines
from eagle2.models.tiny import TOKENIZER_SIZE, write_tiny_target
from eagle2.protocol import Commit, GenerationRequest, ModelDescription, Replica
from eagle2.router.api import COMPLETIONS, create_app
from eagle2.router.settings import RouterSettings
from eagle2.session.breaker import GuardedStore
from eagle2.session.memory import MemorySessionStore
from eagle2.session.session import HEADER
from eagle2.telemetry import metrics
from eagle2.verifier.service import VerifierService
from eagle2.verifier.start import new_incarnation

Affinity = Literal["session", "random"]

_OPENING, _QUESTION, _ANSWER, _SYSTEM = 150, 50, 24, 512  # tokens
_FIRST_TEXT_ID = 3  # those before it are special
_TTL_S = 3600.0


class EngineFleet:
    """Implements ``eagle2.protocol.Fleet`` with verifiers of this process."""

    def __init__(self, services: list[VerifierService], max_sequences: int) -> None:
        self._services = {
            Replica(f"r{number}", f"r{number}.1", max_sequences): service for number, service in enumerate(services)
        }
        self.started = dict.fromkeys(self._services, 0)

    def replicas(self) -> tuple[Replica, ...]:
        return tuple(self._services)

    def generate(self, replica: Replica, request: GenerationRequest) -> AsyncIterator[Commit]:
        self.started[replica] += 1
        return self._services[replica].generate(request)

    async def describe(self) -> ModelDescription:
        return await next(iter(self._services.values())).describe()

    async def stats(self) -> dict[str, float]:
        return {}


@dataclass
class _Result:
    """Tokens over all turns: of prompts, of what an earlier turn had read or written, and of what was found."""

    prompt: int = 0
    known: int = 0
    cached: int = 0
    later_cached: int = 0
    prefilled: int = 0
    started: list[int] = field(default_factory=list)

    @property
    def row(self) -> str:
        mean = sum(self.started) / len(self.started)
        return (
            f"{self.cached / self.prompt:.1%} | {self.later_cached / self.known:.1%} | {self.prefilled:,} | "
            f"{max(self.started) / mean:.2f}"
        )


class _Chats:
    """The conversations of one contender."""

    def __init__(self, clients: list[httpx.AsyncClient], arguments: argparse.Namespace, *, named: bool, shared: bool):
        self._clients, self._arguments, self._named = clients, arguments, named
        draw = random.Random(arguments.seed)
        self._system = self._tokens(draw, _SYSTEM) if shared else []
        self._places = asyncio.Semaphore(arguments.at_once)
        self.result = _Result()

    async def run(self) -> None:
        await asyncio.gather(*(self._chat(number) for number in range(self._arguments.chats)))

    async def _chat(self, number: int) -> None:
        draw = random.Random(f"{self._arguments.seed}.{number}")
        known: list[int] = []
        prompt = [*self._system, *self._tokens(draw, _OPENING)]
        for turn in range(self._arguments.turns):
            async with self._places:
                answer, cached = await self._turn(number, turn, prompt)
            result = self.result
            result.prompt += len(prompt)
            result.cached += cached
            result.known += len(known)
            result.later_cached += cached if known else 0
            known = [*prompt, *answer]
            prompt = [*known, *self._tokens(draw, _QUESTION)]

    async def _turn(self, number: int, turn: int, prompt: list[int]) -> tuple[list[int], int]:
        body = {"prompt": prompt, "max_tokens": _ANSWER, "seed": number, "ignore_eos": True, "return_token_ids": True}
        client = self._clients[(number + turn) % len(self._clients)]
        headers = {HEADER: f"chat-{number}"} if self._named else {}
        reply = await client.post(COMPLETIONS, json=body, headers=headers)
        reply.raise_for_status()
        content = reply.json()
        cached: int = content["usage"]["prompt_tokens_details"]["cached_tokens"]
        return content["choices"][0]["token_ids"], cached

    @staticmethod
    def _tokens(draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(_FIRST_TEXT_ID, TOKENIZER_SIZE) for _ in range(count)]


@contextmanager
def _engines(settings: Settings, count: int) -> Iterator[tuple[EngineFleet, list[Engine]]]:
    checkpoint = load_checkpoint(settings.model)
    engines = [build_engine(settings, checkpoint, None, new_incarnation()) for _ in range(count)]
    with ExitStack() as stack:
        services = []
        for engine in engines:
            service = VerifierService(engine, describe(settings, checkpoint), heartbeat_s=1.0)
            stack.callback(service.close)
            services.append(service)
        yield EngineFleet(services, settings.engine.max_sequences), engines


async def _measure(
    settings: Settings, arguments: argparse.Namespace, affinity: Affinity, *, named: bool, shared: bool
) -> _Result:
    store = MemorySessionStore(_TTL_S)
    with _engines(settings, arguments.replicas) as (fleet, engines):
        async with AsyncExitStack() as stack:
            clients = []
            for router in ("a", "b"):
                app = create_app(
                    fleet,
                    RouterSettings(),
                    store=GuardedStore(MemorySessionStore(_TTL_S, beside=store), 1.0),
                    router=router,
                    routing=RoutingSettings(affinity=affinity),
                    admission=AdmissionSettings(),
                )
                await stack.enter_async_context(app.router.lifespan_context(app))
                client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router", timeout=120)
                clients.append(await stack.enter_async_context(client))
            chats = _Chats(clients, arguments, named=named, shared=shared)
            await chats.run()
        result = chats.result
        result.prefilled = round(sum(engine.stats.get(metrics.PREFILL_TOKENS) for engine in engines))
        result.started = list(fleet.started.values())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="How much of a conversation is found in a cache.")
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=8, help="turns in flight")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--kv-slots", type=int, default=32768, help="tokens that each replica's cache holds")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    contenders: list[tuple[str, Affinity, bool]] = [
        ("session", "session", True),
        ("session, chats without a name", "session", False),
        ("random", "random", True),
    ]
    print(
        "| openings | affinity | found, of all prompt tokens | of the history | prefilled tokens | most / mean load |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(prefix="e2affinity") as folder:
        write_tiny_target(Path(folder), max_position_embeddings=4096)
        engine = {"threads": 1, "kv_slots": arguments.kv_slots, "max_sequences": 8}
        settings = load_settings(
            flags={"model": {"target": folder, "draft": None, "dtype": "float32"}, "engine": engine}
        )
        for shared in (False, True):
            for name, affinity, named in contenders:
                result = asyncio.run(_measure(settings, arguments, affinity, named=named, shared=shared))
                print(f"| {'shared' if shared else 'own'} | {name} | {result.row} |", flush=True)
    print(f"\n{conditions_lines(Conditions.now(load))}")


if __name__ == "__main__":
    main()
