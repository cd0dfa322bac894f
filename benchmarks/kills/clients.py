"""One stream over HTTP as its client sees it: every item with its time, and how it ended."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from benchmarks.kills.conversations import Turn

End = Literal["finished", "error", "broken", "refused"]
"""``[DONE]`` behind a finish reason; an error event; a connection that closed before; a status that is not 200."""

ROUTER = "x-eagle2-router"


@dataclass(slots=True)
class Stream:
    """``times`` are monotonic, one for each item with tokens. ``router`` is None when no router has answered."""

    name: str
    key: tuple[int, int]
    opened: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    router: str | None = None
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: tuple[int, int] | None = None
    end: End = "broken"
    problem: str = ""

    @property
    def said(self) -> tuple[tuple[int, ...], str, str | None, tuple[int, int] | None]:
        """What must not depend on who was killed meanwhile."""
        return tuple(self.token_ids), self.text, self.finish_reason, self.usage

    def largest_gap(self, begin: float, end: float) -> float | None:
        """Seconds between two items that are next to each other, of gaps that touch the interval; None without one."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if before <= end and after >= begin), default=None)


def client_of(port: int, streams: int) -> httpx.AsyncClient:
    """Without time limits of its own: every wait is bounded by whoever runs the benchmark."""
    limits = httpx.Limits(max_connections=2 * streams, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=None, trust_env=False)


async def read_stream(client: httpx.AsyncClient, stream: Stream, prompt: list[int], turn: Turn, session: str) -> None:
    """Ask and read to the end, whichever it is."""
    body = {"prompt": prompt, "stream": True, "return_token_ids": True, "session_id": session, **turn.fields}
    body["stream_options"] = {"include_usage": True}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": stream.name}) as reply:
            stream.router = reply.headers.get(ROUTER)
            if reply.status_code != 200:
                stream.end = "refused"
                stream.problem = f"{reply.status_code} {(await reply.aread())[:200]!r}"
            else:
                async for line in reply.aiter_lines():
                    _take(stream, line)
    except httpx.TransportError as error:
        stream.end = "broken"
        stream.problem = f"{type(error).__name__}: {error}"
    stream.ended = time.monotonic()


def _take(stream: Stream, line: str) -> None:
    if not line.startswith("data: "):
        return
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        assert stream.end == "broken", f"{stream.name} ended twice"
        stream.end = "finished"
        return
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        stream.end = "error"
        stream.problem = str(event["error"])
        return
    if event.get("usage"):
        stream.usage = event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        if choice["token_ids"]:
            stream.times.append(time.monotonic())
            stream.token_ids += choice["token_ids"]
        stream.text += choice["text"]
        stream.finish_reason = choice["finish_reason"] or stream.finish_reason
