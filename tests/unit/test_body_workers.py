"""Bodies wait for those of their size only, and small ones for nobody."""

from __future__ import annotations

import asyncio
import threading

from eagle2.router.settings import RouterSettings
from eagle2.router.workers import BodyWorkers

INLINE, USUAL, LARGE = 10, 100, 101


async def test_large_bodies_hold_up_no_others() -> None:
    workers = BodyWorkers(RouterSettings(inline_body_bytes=INLINE, large_body_bytes=USUAL))
    gate = threading.Event()
    try:
        async with asyncio.timeout(20):
            large = [asyncio.create_task(workers.run(LARGE, lambda: gate.wait(20))) for _ in range(3)]
            await asyncio.sleep(0)
            assert await workers.run(INLINE, threading.current_thread) is threading.current_thread()
            usual = await workers.run(USUAL, threading.current_thread)
            assert usual is not threading.current_thread()
            assert not any(task.done() for task in large)
            gate.set()
            assert await asyncio.gather(*large) == [True] * 3
            assert await workers.run(LARGE, threading.current_thread) not in (usual, threading.current_thread())
    finally:
        gate.set()
        workers.close()
