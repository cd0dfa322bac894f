"""Clients that cost little: one socket and one protocol object each, and a pattern for what they are after."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

import numpy as np

_ITEM = re.compile(rb'"text":" (\d+)"')
_PATH = "/v1/completions"


@dataclass
class Received:
    """Items of all streams: when each was made and when it was read, in nanoseconds."""

    made: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)

    def latencies_ms(self, begin_s: float, end_s: float) -> np.ndarray:
        """Of the items that were made between two monotonic times."""
        made, read = np.array(self.made), np.array(self.read)
        within = (made >= begin_s * 1e9) & (made < end_s * 1e9)
        return np.asarray((read - made)[within] / 1e6)


class StreamClient(asyncio.Protocol):
    """One stream. ``opened`` is done with its first item, ``ended`` with its end: None, or what went wrong."""

    def __init__(self, received: Received, items: int, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.opened, self.ended = loop.create_future(), loop.create_future()
        self._received, self._items = received, items
        body = f'{{"prompt":[0,1],"max_tokens":{items},"stream":true,"session_id":"s{number}"}}'
        self._request = (
            f"POST {_PATH} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self._count = 0
        self._tail = b""
        self._done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self._tail + data
        end = 0
        for found in _ITEM.finditer(data):
            self._received.made.append(int(found[1]))
            self._received.read.append(now)
            self._count += 1
            end = found.end()
        self._tail = data[max(end, len(data) - 64) :]
        if self._count and not self.opened.done():
            self.opened.set_result(None)
        if b"[DONE]" in data:
            self._done = True
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        problem = None
        if not self._done or self._count != self._items:
            problem = f"{self._count} of {self._items} items, end seen: {self._done}, {exc!r}, {self._tail!r}"
        for future in (self.opened, self.ended):
            if not future.done():
                future.set_result(problem)


async def open_stream(port: int, received: Received, items: int, number: int) -> StreamClient:
    """Connect and ask; returns without waiting for an answer."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: StreamClient(received, items, number), "127.0.0.1", port)
    return client
