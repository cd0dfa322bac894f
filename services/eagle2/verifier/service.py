"""The verifier as plain Python: an engine thread behind asynchronous streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from eagle2.engine.engine import Engine
from eagle2.errors import DrainingError, RequestError, UnavailableError
from eagle2.models.target import TargetModel
from eagle2.protocol import Commit, GenerationRequest, ModelDescription
from eagle2.telemetry import metrics


class VerifierService:
    """Implements ``eagle2.protocol.Verifier`` in the process of the engine.

    With ``heartbeat_s``, streams begin with an empty commit once the request is taken, and have another one after so
    many seconds without a commit, but only if the engine has turned meanwhile: one that hangs shows no sign of life.
    """

    def __init__(self, engine: Engine, description: ModelDescription, *, heartbeat_s: float | None = None) -> None:
        self._engine, self._description = engine, description
        self._heartbeat_s = heartbeat_s
        self._draining = False
        self._leaving = False
        self._open_streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        engine.start()

    @property
    def target_model(self) -> TargetModel:
        """The weights in use, for whoever wants to compute beside the engine (with a cache of their own)."""
        return self._engine.target_model

    async def describe(self) -> ModelDescription:
        return self._description

    async def stats(self) -> dict[str, float]:
        self.check_health()
        return self._engine.stats.snapshot()

    def kv_share(self) -> float:
        """What sequences hold of the KV slots, 0 to 1."""
        stats = self._engine.stats.snapshot()
        used, capacity = (m.sample(side="target") for m in (metrics.KV_SLOTS_USED, metrics.KV_SLOTS_CAPACITY))
        return stats.get(used, 0.0) / stats[capacity]

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        """One item a commit. Closing the iterator ends the decoding within a step and frees its slots."""
        self._check(request)
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Commit] = asyncio.Queue()

        def sink(commit: Commit) -> None:
            # The loop may be gone when the process ends in the middle of a stream: nobody reads any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(items.put_nowait, commit)

        sequence = self._engine.submit(request, sink)
        self._open_streams += 1
        self._idle.clear()
        turns = self._engine.turns
        try:
            if self._heartbeat_s is not None:
                yield Commit((), "")
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        commit = await items.get()
                except TimeoutError:
                    if self._engine.turns != turns:
                        turns = self._engine.turns
                        yield Commit((), "")
                    continue
                yield commit
                if commit.finish_reason is not None:
                    return
        finally:
            self._open_streams -= 1
            if not self._open_streams:
                self._idle.set()
            self._engine.cancel(sequence)

    def check_health(self) -> None:
        """Raises ``UnavailableError`` when the engine has failed."""
        if self._engine.failure is not None:
            raise UnavailableError(f"The engine has failed: {self._engine.failure}") from self._engine.failure

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused, with ``DrainingError``."""
        return self._draining or self._leaving

    def node_leaves(self, reason: str | None) -> None:
        """Take no new requests while there is a reason; those that run go on. May be called from any thread."""
        self._leaving = reason is not None

    async def drain(self) -> None:
        """Take no new requests and wait for the running ones."""
        self._draining = True
        await self._idle.wait()

    def close(self) -> None:
        self._engine.stop()

    def _check(self, request: GenerationRequest) -> None:
        self.check_health()
        if self.is_draining:
            raise DrainingError("This verifier is shutting down.")
        length, limit = len(request.prompt_ids), self._description.max_model_len
        if length == 0:
            raise RequestError("The prompt has no tokens.", param="prompt")
        if length >= limit:
            raise RequestError(
                f"The prompt has {length} tokens, but the context holds {limit}, answer included.",
                param="prompt",
                code="context_length_exceeded",
            )
        highest = max(max(request.prompt_ids), max(request.output_ids, default=0))
        if min(request.prompt_ids) < 0 or highest >= self._description.vocab_size:
            raise RequestError(
                f"A token id is between 0 and {self._description.vocab_size - 1}, got {highest}.", param="prompt"
            )
        outside = [i for i, _ in request.sampling.logit_bias if not 0 <= i < self._description.vocab_size]
        if outside:
            raise RequestError(f"logit_bias names the token {outside[0]}, which does not exist.", param="logit_bias")
