"""One generation between a verifier and a client: its commits, who still listens, and its clean end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

from eagle2.protocol import Commit
from eagle2.router.failures import GenerationError

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818 - an event, nobody's error
    """The client left before its answer was complete."""


class SlowReader(Exception):  # noqa: N818
    """The client kept the connection and did not read from it for too long."""


async def while_connected(receive: Receive, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """``work()``, cancelled as soon as the client leaves. Raises ClientGone then.

    ``receive`` must have yielded the whole body already, so that all it can still bring is the disconnect.
    """
    task = asyncio.create_task(work())
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def bounded(send: Send, timeout_s: float) -> Send:
    """``send`` that raises SlowReader when the server cannot hand a write on in time."""

    async def write(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send(message)
        except TimeoutError as error:
            raise SlowReader from error

    return write


class CommitStream:
    """The commits of one generation, read by one task at a time, and closed exactly once."""

    def __init__(self, commits: AsyncIterator[Commit], close_timeout_s: float) -> None:
        self._commits = commits
        self._close_timeout_s = close_timeout_s
        self.finished = False

    async def next(self) -> Commit:
        """The next commit. Raises GenerationError where the verifier reports one or ends without a reason."""
        try:
            commit = await anext(self._commits)
        except StopAsyncIteration as error:
            raise GenerationError("The generation ended without saying why.") from error
        if commit.error is not None or commit.finish_reason == "error":
            self.finished = True
            raise GenerationError(commit.error or "The generation failed.", commit.error_code or "generation_failed")
        if commit.finish_reason is not None:
            if commit.usage is None:
                raise GenerationError("The generation ended without its counts.")
            self.finished = True
        return commit

    async def close(self) -> None:
        """End the decoding. Raises nothing."""
        await close_quietly(self._commits, finished=self.finished, timeout_s=self._close_timeout_s)


async def close_quietly(commits: AsyncIterator[Commit], *, finished: bool, timeout_s: float) -> None:
    """Close an iterator of commits. After the last one this only lets it run out, so that no abort is seen.

    One that fails or hangs while it is let go must not hold up its reader: every step ends after ``timeout_s``.
    """
    steps: list[Callable[[], Awaitable[object]]] = []
    if finished:
        steps.append(lambda: anext(commits, None))
    close = getattr(commits, "aclose", None)
    if close is not None:
        steps.append(close)
    for step in steps:
        try:
            async with asyncio.timeout(timeout_s):
                await step()
        except Exception:
            continue
