"""Requests and tokens per minute of every key: taken before the work, the answer's tokens when they are known."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping

from eagle2.errors import OverloadedError
from eagle2.protocol import Commit
from eagle2.router.buckets import PERIOD_S, Buckets, Level, LocalBuckets, wait_s
from eagle2.router.tenants import Caller
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

_LOG = logging.getLogger(__name__)


class Quotas:
    """Holds callers to their limits, in ``shared`` buckets where there are some, else in those of this process.

    When ``shared`` fails, this process counts alone for ``retry_s``, from full buckets on: no request fails for it.
    ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        recorder: Recorder,
        shared: Buckets | None = None,
        *,
        retry_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorder = recorder
        self._shared = shared
        self._local = LocalBuckets(clock)
        self._retry_s = retry_s
        self._clock = clock
        self._shared_from = -math.inf
        self._settling: set[asyncio.Task[Level]] = set()

    async def take_request(self, caller: Caller) -> dict[str, str]:
        """Count one request. Returns the headers that tell the caller what is left; raises ``OverloadedError``."""
        return await self._take(caller, "requests", caller.requests_per_minute, 1)

    async def take_prompt(self, caller: Caller, tokens: int) -> dict[str, str]:
        """Charge the tokens of a prompt, before they are read. Returns headers; raises ``OverloadedError``."""
        return await self._take(caller, "tokens", caller.tokens_per_minute, tokens)

    def charge_answer(self, caller: Caller, tokens: int) -> None:
        """Charge the tokens of an answer, whatever is left: the next requests wait until that is paid off."""
        limit = caller.tokens_per_minute
        if limit is None or tokens <= 0:
            return
        task = asyncio.get_running_loop().create_task(self._level(_name(caller, "tokens"), tokens, limit, debt=True))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def settle(self) -> None:
        """Wait until all charges have been written."""
        await asyncio.gather(*self._settling)

    async def metered(self, caller: Caller, commits: AsyncIterator[Commit]) -> AsyncIterator[Commit]:
        """``commits``, whose tokens are charged when they end, break off or are closed."""
        tokens = 0
        try:
            async for commit in commits:
                tokens += len(commit.token_ids)
                yield commit
        finally:
            self.charge_answer(caller, tokens)
            close = getattr(commits, "aclose", None)
            if close is not None:
                await close()

    async def _take(self, caller: Caller, kind: str, limit: int | None, cost: int) -> dict[str, str]:
        if limit is None:
            return {}
        level = await self._level(_name(caller, kind), cost, limit)
        headers = rate_headers(kind, limit, level.left)
        if level.granted:
            return headers
        self._recorder.add(metrics.QUOTA_REFUSALS, limit=kind)
        wait = wait_s(level.left, cost, limit)
        raise QuotaError(
            f"This key may use {limit} {kind} a minute and has used them up; try again in {math.ceil(wait)} seconds.",
            retry_after_s=wait,
            headers=headers,
        )

    async def _level(self, name: str, cost: int, limit: int, *, debt: bool = False) -> Level:
        if self._shared is not None and self._clock() >= self._shared_from:
            try:
                return await self._shared.take(name, cost, limit, debt=debt)
            except Exception as error:
                self._shared_from = self._clock() + self._retry_s
                self._recorder.add(metrics.QUOTA_FALLBACKS)
                _LOG.warning("The shared quotas do not answer (%s); this router counts alone.", type(error).__name__)
        return await self._local.take(name, cost, limit, debt=debt)


class QuotaError(OverloadedError):
    """A key has used up what it may use in a minute: 429. ``headers`` say how much it may, and when again."""

    def __init__(self, message: str, *, retry_after_s: float, headers: Mapping[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s, code="rate_limit_exceeded")
        self.headers = dict(headers)


def rate_headers(kind: str, limit: int, left: float) -> dict[str, str]:
    """What OpenAI's clients know: the limit, what remains of it, and when all of it is there again."""
    reset = max(0.0, limit - left) * PERIOD_S / limit
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(max(0, math.floor(left))),
        f"x-ratelimit-reset-{kind}": _duration(reset),
    }


def _duration(seconds: float) -> str:
    """Seconds as ``250ms``, ``1.5s`` or ``6m0s``."""
    ms = math.ceil(round(seconds * 1000, 3))
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{math.ceil(ms / 100) / 10:g}s"
    minutes, rest = divmod(math.ceil(ms / 1000), 60)
    return f"{minutes}m{rest}s"


def _name(caller: Caller, kind: str) -> str:
    return f"{kind}:{caller.key}"
