"""The whole run: record the answers in quiet, keep streams open while processes are killed, compare."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.kills.clients import Stream, client_of, read_stream
from benchmarks.kills.conversations import Conversation, draw_conversations
from benchmarks.kills.pool import Kind, Member, Pool
from benchmarks.kills.redis_process import RedisProcess
from benchmarks.kills.report import Kill, Report, judge
from eagle2.models.tiny import write_tiny_head, write_tiny_target
from eagle2.operations.local_cluster import LocalCluster

Say = Callable[[str], None]

_BAG: tuple[Kind, ...] = ("verifier",) * 4 + ("proposer",) * 2 + ("redis",) * 3 + ("router",)
_OUTAGE_S = 2.0  # of Redis, so that requests come meanwhile
_WHOLE_S = 180.0
_END_S = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """``kinds``: the victims in this order; drawn when empty. ``tokens``: the least and the most of an answer."""

    pairs: int = 4
    routers: int = 2
    streams: int = 64
    kills: int = 30
    conversations: int = 120
    tokens: tuple[int, int] = (100, 400)
    seed: int = 0
    kinds: tuple[Kind, ...] = ()


def run_kills(plan: Plan, folder: Path, *, say: Say = lambda _: None) -> Report:
    """Serve a tiny model, kill ``plan.kills`` of its processes, and tell what became of the streams.

    Raises TimeoutError where the service does not recover.
    """
    target = write_tiny_target(folder / "target", max_position_embeddings=4096)
    head = write_tiny_head(folder / "head", target)
    # Any one verifier may be missing. The trees are fixed: the tiny target is as fast as its head, so none would pay.
    most = -(-plan.streams // max(1, plan.pairs - 1)) + 2
    engine: dict[str, Any] = {"threads": 1, "max_sequences": most, "kv_slots": 2048 * most, "tree_budget": "fixed"}
    engine |= {"depth": 2, "top_k": 8, "num_draft_tokens": 10}
    redis = RedisProcess(folder)
    redis.start()
    try:
        with LocalCluster() as cluster:
            pool = Pool(cluster, redis, pairs=plan.pairs, routers=plan.routers)
            pool.deploy(target, head, engine)
            return asyncio.run(_Run(plan, pool, redis, say).run())
    finally:
        redis.kill()


class _Run:
    def __init__(self, plan: Plan, pool: Pool, redis: RedisProcess, say: Say) -> None:
        self._plan, self._pool, self._redis, self._say = plan, pool, redis, say
        self._draw = random.Random(plan.seed)
        self._conversations = draw_conversations(plan.seed, plan.conversations, plan.tokens)
        self._answers: dict[tuple[int, int], Stream] = {}
        self._streams: list[Stream] = []
        self._ending = False
        self._enough = asyncio.Event()

    async def run(self) -> Report:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._pool.close)
            client = await stack.enter_async_context(client_of(self._pool.port, self._plan.streams))
            await self._pool.whole(None, 2 * _WHOLE_S)
            self._say("all is there; recording answers in quiet")
            began = time.monotonic()
            await self._record(client)
            quiet = [gap for stream in self._answers.values() if (gap := stream.largest_gap(0.0, stream.ended))]
            tokens = sum(len(stream.token_ids) for stream in self._answers.values())
            seconds = time.monotonic() - began
            self._say(f"{len(self._answers)} answers of {tokens} tokens recorded in {seconds:.0f} s")
            workers = [asyncio.create_task(self._work(client, number)) for number in range(self._plan.streams)]
            try:
                kills = await self._kill(workers)
                self._ending = True
                self._say("waiting for the open streams")
                _, late = await asyncio.wait(workers, timeout=_END_S)
                for stream in self._streams:
                    if not stream.ended:
                        stream.ended = time.monotonic()
                        stream.problem = f"still open {_END_S:g} s after the last kill"
                for worker in set(workers) - late:
                    worker.result()
            finally:
                for worker in workers:
                    worker.cancel()
            moves = await asyncio.to_thread(self._pool.moves)
        return judge(self._streams, self._answers, kills, moves, quiet)

    async def _record(self, client: httpx.AsyncClient) -> None:
        places = asyncio.Semaphore(self._plan.streams)

        async def one(conversation: Conversation) -> None:
            async with places:
                streams = await self._converse(client, conversation, f"quiet-{conversation.number}")
            for stream in streams:
                if stream.end != "finished":
                    raise RuntimeError(f"{stream.name} failed before anything was killed: {stream.problem}")
                self._answers[stream.key] = stream

        await asyncio.gather(*(one(conversation) for conversation in self._conversations))

    async def _work(self, client: httpx.AsyncClient, worker: int) -> None:
        """One client: conversation after conversation."""
        draw = random.Random(f"{self._plan.seed} {worker}")
        number = 0
        while not self._ending:
            number += 1
            await self._converse(client, draw.choice(self._conversations), f"w{worker}-{number}", self._streams)
            if self._streams[-1].end == "refused":
                await asyncio.sleep(1.0)

    async def _converse(
        self, client: httpx.AsyncClient, conversation: Conversation, name: str, into: list[Stream] | None = None
    ) -> list[Stream]:
        """The turns one after another, up to the first that does not finish."""
        streams: list[Stream] = [] if into is None else into
        said: list[int] = []
        for number, turn in enumerate(conversation.turns):
            if self._ending:
                break
            said += turn.added
            stream = Stream(f"{name}-{number}", (conversation.number, number))
            streams.append(stream)
            await read_stream(client, stream, list(said), turn, name)
            if stream.end != "finished":
                break
            said += stream.token_ids
        return streams

    async def _kill(self, workers: list[asyncio.Task[None]]) -> list[Kill]:
        kills: list[Kill] = []
        await asyncio.sleep(5.0)  # until streams are open and of different ages
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._enough.set)
        for number, kind in enumerate(self._kinds()):
            if self._enough.is_set():
                self._say("ended early")
                break
            victim = await self._victim(kind)
            kill = Kill(kind, victim.uid, time.monotonic())
            kills.append(kill)
            if kind == "redis":
                self._redis.kill()
                await asyncio.sleep(_OUTAGE_S)
                await asyncio.to_thread(self._redis.start)
                self._pool.redis_was_lost()
            else:
                self._pool.kill(victim)
            await self._pool.whole(victim.uid, _WHOLE_S)
            kill.recovered = time.monotonic()
            for worker in workers:
                if worker.done():
                    worker.result()
                    raise RuntimeError("a client has stopped asking")
            ended = sum(stream.ended > 0 for stream in self._streams)
            self._say(
                f"kill {number + 1}/{self._plan.kills}: {kind} {victim.uid} (pid {victim.pid}), whole again after "
                f"{kill.recovery_s:.1f} s; {ended} streams have ended, {len(self._streams) - ended} are open"
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(kill.recovery_s):
                    await self._enough.wait()
        return kills

    def _kinds(self) -> list[Kind]:
        kinds: list[Kind] = list(self._plan.kinds)
        while len(kinds) < self._plan.kills:
            kinds += self._draw.sample(_BAG, len(_BAG))
        return kinds[: self._plan.kills]

    async def _victim(self, kind: Kind) -> Member:
        if kind == "redis":
            return Member("redis", "redis", self._redis.pid)
        members = await asyncio.to_thread(self._pool.members)
        return self._draw.choice(sorted((m for m in members if m.kind == kind), key=lambda member: member.uid))
