"""Open streams on one router process: what each costs, and how late its items are.

    python -m benchmarks.open_streams [--streams 2000] [--seconds 60] [--pace 1.0] [--rate 100] [--aligned]

The router is served by uvicorn in a process of its own, before replicas without a model that say the time every
``--pace`` seconds. Clients in this process open ``--rate`` streams a second; when all are open, ``--seconds`` are
measured. An item's latency is from the moment that the replica had it to the moment that its client had read it, over
HTTP and back to this process, so it includes what the clients themselves are late. ``--aligned`` gives all streams
their items at the same moments, the worst that can happen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.open_streams.clients import Received, StreamClient, open_stream
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.report import conditions_lines

_WARM_STREAMS = 50
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class _Usage:
    """What a process has used so far: resident bytes, and seconds of processor time."""

    resident: int
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> _Usage:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK"))


@dataclass(frozen=True, slots=True)
class _Result:
    failures: list[str]
    latencies_ms: np.ndarray
    lags_ms: np.ndarray
    bytes_per_stream: float
    kept_bytes: list[int]
    cpu_share: float
    client_cpu_share: float


async def _measure(arguments: argparse.Namespace) -> _Result:
    options = ["--streams", str(arguments.streams), "--pace", str(arguments.pace), "--loop", arguments.loop]
    options += ["--aligned"] if arguments.aligned else []
    command = [sys.executable, "-m", "benchmarks.open_streams.router", *options]
    pipe = asyncio.subprocess.PIPE
    router = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 26)
    assert router.stdin is not None
    assert router.stdout is not None
    try:
        port = int(await router.stdout.readline())
        received = Received()
        warm = [await open_stream(port, Received(), 2, number) for number in range(_WARM_STREAMS)]
        problems = await asyncio.gather(*(client.ended for client in warm))
        before = _Usage.of(router.pid)

        items = int((arguments.streams / arguments.rate + arguments.seconds) / arguments.pace) + 5
        clients = await _open_all(port, received, arguments, items)
        opened, usage, own = time.monotonic(), _Usage.of(router.pid), _Usage.of(os.getpid())
        await asyncio.sleep(arguments.seconds)
        end, after, own_after = time.monotonic(), _Usage.of(router.pid), _Usage.of(os.getpid())

        async with asyncio.timeout(items * arguments.pace + _END_S):
            problems += await asyncio.gather(*(client.ended for client in clients))
        kept = [await _kept(router.pid, before)]
        # What is kept once is the allocator's; a leak would be kept again.
        again = await _open_all(port, Received(), arguments, items - int(arguments.seconds / arguments.pace))
        async with asyncio.timeout(items * arguments.pace + _END_S):
            problems += await asyncio.gather(*(client.ended for client in again))
        kept.append(await _kept(router.pid, before))
        router.stdin.close()
        lags = np.array(json.loads(await router.stdout.readline()))
    finally:
        router.stdin.close()
        await router.wait()
    return _Result(
        failures=[problem for problem in problems if problem is not None],
        latencies_ms=received.latencies_ms(opened, end),
        lags_ms=1e3 * lags[(lags[:, 0] >= opened) & (lags[:, 0] < end), 1],
        bytes_per_stream=(after.resident - before.resident) / arguments.streams,
        kept_bytes=kept,
        cpu_share=(after.cpu_s - usage.cpu_s) / (end - opened),
        client_cpu_share=(own_after.cpu_s - own.cpu_s) / (end - opened),
    )


async def _open_all(port: int, received: Received, arguments: argparse.Namespace, items: int) -> list[StreamClient]:
    """All streams, each with its first item."""
    clients = []
    began = time.monotonic()
    for number in range(arguments.streams):
        await asyncio.sleep(began + number / arguments.rate - time.monotonic())
        clients.append(await open_stream(port, received, items, number))
    await asyncio.gather(*(client.opened for client in clients))
    return clients


async def _kept(pid: int, before: _Usage) -> int:
    await asyncio.sleep(1.0)
    return _Usage.of(pid).resident - before.resident


def _row(name: str, values: np.ndarray) -> str:
    p50, p99 = np.percentile(values, [50, 99])
    return f"| {name}: p50 / p99 / most | {p50:.1f} / {p99:.1f} / {values.max():.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Open streams on one router process.")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pace", type=float, default=1.0, help="seconds between two items of a stream")
    parser.add_argument("--rate", type=float, default=100.0, help="streams opened a second")
    parser.add_argument("--aligned", action="store_true", help="all streams have their items at the same moments")
    parser.add_argument("--loop", choices=["auto", "asyncio", "uvloop"], default="auto", help="the router's event loop")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    result = asyncio.run(_measure(arguments))
    for problem in result.failures[:5]:
        print(f"FAILED: {problem}")
    rate = result.latencies_ms.size / arguments.seconds
    print(f"| {arguments.streams} streams, an item every {arguments.pace:g} s | |\n| --- | ---: |")
    print(f"| streams that failed | {len(result.failures)} |")
    print(f"| items a second | {rate:.0f} |")
    print(_row("an item's latency, ms", result.latencies_ms))
    print(_row("lateness of the router's event loop, ms", result.lags_ms))
    print(f"| the router's CPU, cores | {result.cpu_share:.2f} |")
    print(f"| CPU for an item, ms | {1e3 * result.cpu_share / rate:.3f} |")
    print(f"| the clients' CPU, cores | {result.client_cpu_share:.2f} |")
    print(f"| the router's memory, KiB a stream | {result.bytes_per_stream / 1024:.0f} |")
    once, twice = (kept / 2**20 for kept in result.kept_bytes)
    print(f"| memory kept when all had ended, and after as many again, MiB | {once:.0f}, {twice:.0f} |")
    print(f"\n{conditions_lines(Conditions.now(load))}")


if __name__ == "__main__":
    main()
