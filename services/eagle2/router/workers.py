"""Threads that parse and tokenise bodies, so that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from eagle2.router.settings import RouterSettings

T = TypeVar("T")


class BodyWorkers:
    """Small bodies are read where they arrive, on the event loop; others by one thread for each of two sizes.

    A body far larger than prompts are takes a tenth of a second and is mostly refused in the end: those wait for
    each other only. More threads would not be faster, since most of the work holds the interpreter, and the event
    loop would get its turn less often.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._inline_bytes, self._large_bytes = settings.inline_body_bytes, settings.large_body_bytes
        self._usual, self._large = (
            ThreadPoolExecutor(1, thread_name_prefix=f"eagle2-{size}-bodies") for size in ("usual", "large")
        )

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What ``work`` returns for a body of ``size`` bytes, or raises."""
        if size <= self._inline_bytes:
            return work()
        worker = self._usual if size <= self._large_bytes else self._large
        return await asyncio.get_running_loop().run_in_executor(worker, work)

    def close(self) -> None:
        """Let the threads end."""
        for worker in (self._usual, self._large):
            worker.shutdown(wait=False, cancel_futures=True)
