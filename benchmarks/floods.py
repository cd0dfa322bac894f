"""How long /health takes while large bodies flood a router.

    python -m benchmarks.floods [--bodies 50] [--rounds 3] [--kinds text,spaces,messages,ids,lists,good]

The router runs in a process of its own, before a stub with the embedded model's tokenizer. ``--bodies`` clients send a
body of almost 4 MiB each at the same moment, while another one asks for /health again and again, on one connection and
on new ones. All kinds but ``good`` are refused; ``good`` are chats of 12 KiB that are answered, sent ten times as many.
What is printed is a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from eagle2.protocol import Commit, GenerationRequest, ModelDescription, Usage
from eagle2.router.api import CHAT, COMPLETIONS, create_app
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet

_SIZE = 4 * 1024 * 1024 - 4096
_PROBE_PAUSE_S = 0.005


class StubVerifier:
    """Implements ``eagle2.protocol.Verifier``: one token for every prompt."""

    def __init__(self, description: ModelDescription) -> None:
        self._description = description

    async def describe(self) -> ModelDescription:
        return self._description

    async def stats(self) -> dict[str, float]:
        return {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        yield Commit((1,), "a", "length", Usage(len(request.prompt_ids), 1, 0, 0, 0, 1))


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body by kind."""
    good = [{"role": "user", "content": "hello world, " * 30}, {"role": "assistant", "content": "Hello! " * 20}] * 20
    good.append({"role": "user", "content": "And now?"})
    return {
        "text": (COMPLETIONS, json.dumps({"prompt": "hello world, " * (_SIZE // 13)}).encode()),
        "spaces": (COMPLETIONS, json.dumps({"prompt": " " * _SIZE}).encode()),
        "messages": (CHAT, json.dumps({"messages": [{"role": "user", "content": "a" * 990}] * 4000}).encode()),
        "ids": (COMPLETIONS, b'{"prompt":[' + b",".join([b"1"] * (_SIZE // 2)) + b"]}"),
        "lists": (COMPLETIONS, b'{"prompt":"x","foo":[' + b",".join([b"[]"] * (_SIZE // 3)) + b"]}"),
        "good": (CHAT, json.dumps({"messages": good, "max_tokens": 1}).encode()),
    }


def _serve(path: Path) -> None:
    import uvicorn

    description = ModelDescription(**json.loads(path.read_text()))
    app = create_app(SingleFleet(StubVerifier(description), 256), RouterSettings())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=2))

    async def serve() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - there is nothing else to wait for
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving

    asyncio.run(serve())


async def _post(port: int, request: bytes) -> int:
    """The status of one request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


def _request(kind: str) -> bytes:
    path, body = bodies()[kind]
    head = f"POST {path} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def flood(port: int, kind: str, count: int) -> Counter[int]:
    """The statuses of ``count`` bodies at once. Runs in a process of its own: sending keeps it busy."""

    async def send() -> list[int]:
        request = _request(kind)
        return await asyncio.gather(*(_post(port, request) for _ in range(count)))

    return Counter(asyncio.run(send()))


async def _health(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(length)


async def _probe(port: int, flooding: asyncio.Future[Counter[int]], *, anew: bool) -> list[float]:
    """Milliseconds of every /health while the flood lasts."""
    taken = []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while not flooding.done():
        began = time.perf_counter()
        if anew:
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await _health(reader, writer)
        taken.append(1e3 * (time.perf_counter() - began))
        await asyncio.sleep(_PROBE_PAUSE_S)
    writer.close()
    return taken


@dataclass(frozen=True, slots=True)
class _Flood:
    """Milliseconds of every /health, on one connection and on new ones; seconds of all; statuses of the bodies."""

    kept: list[float]
    anew: list[float]
    seconds: float
    statuses: Counter[int]


async def _flood(clients: ProcessPoolExecutor, port: int, kind: str, count: int) -> _Flood:
    began = time.perf_counter()
    flooding = asyncio.get_running_loop().run_in_executor(clients, flood, port, kind, count)
    kept, anew = await asyncio.gather(_probe(port, flooding, anew=False), _probe(port, flooding, anew=True))
    return _Flood(kept, anew, time.perf_counter() - began, await flooding)


def _figures(values: list[float]) -> str:
    p50, p99 = np.percentile(values, [50, 99])
    return f"{p50:.0f} / {p99:.0f} / {max(values):.0f}"


def _row(name: str, floods: list[_Flood]) -> str:
    kept = [ms for flood in floods for ms in flood.kept]
    anew = [ms for flood in floods for ms in flood.anew]
    statuses: Counter[int] = sum((flood.statuses for flood in floods), Counter())
    seconds = np.median([flood.seconds for flood in floods])
    return f"| {name} | {_figures(kept)} | {_figures(anew)} | {seconds:.1f} | {dict(statuses)} |"


def _describe(path: Path) -> None:
    from eagle2.config import load_settings
    from eagle2.engine.assemble import describe, load_checkpoint

    settings = load_settings()
    path.write_text(json.dumps(asdict(describe(settings, load_checkpoint(settings.model)))))


def main() -> None:
    parser = argparse.ArgumentParser(description="How long /health takes while large bodies flood a router.")
    parser.add_argument("--bodies", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(bodies()))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        _serve(arguments.serve)
        return
    from eagle2.evaluation.machine import Conditions
    from eagle2.evaluation.report import conditions_lines

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="e2floods") as folder:
        path = Path(folder) / "model.json"
        _describe(path)
        command = [sys.executable, "-m", "benchmarks.floods", "--serve", str(path)]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as router,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients,
        ):
            assert router.stdin is not None
            assert router.stdout is not None
            try:
                port = int(router.stdout.readline())
                assert clients.submit(flood, port, "good", 1).result() == {200: 1}
                print("| bodies | /health, ms: p50 / p99 / most | on new connections | the flood took, s | answers |")
                print("| --- | ---: | ---: | ---: | --- |")
                for kind in arguments.kinds.split(","):
                    count = arguments.bodies * (10 if kind == "good" else 1)
                    rounds = [asyncio.run(_flood(clients, port, kind, count)) for _ in range(arguments.rounds)]
                    print(_row(f"{count} {kind}", rounds), flush=True)
            finally:
                router.stdin.close()
    print(f"\n{conditions_lines(Conditions.now(load))}")


if __name__ == "__main__":
    main()
