"""Bytes on their way between a client and a server over TCP: late, lost in a black hole, or cut."""

from __future__ import annotations

import asyncio
from types import TracebackType


class TcpProxy:
    """Passes everything on to ``127.0.0.1:upstream_port``. Set what happens at any time:

    delay_s: what comes from the server is that late. black_hole: nothing comes through in either direction, and
    connections stay open. Use as an async context manager.
    """

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.delay_s = 0.0
        self.black_hole = False
        self.connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        while self._tasks:
            self.cut()
            await asyncio.wait(self._tasks, timeout=0.1)

    def cut(self) -> None:
        """Reset all connections there are."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        upstream_writer: asyncio.StreamWriter | None = None
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
            self._writers.add(upstream_writer)
            ways = (
                asyncio.create_task(self._pass(reader, upstream_writer, is_answer=False)),
                asyncio.create_task(self._pass(upstream_reader, writer, is_answer=True)),
            )
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            return
        finally:
            for end in (writer, upstream_writer):
                if end is not None:
                    self._writers.discard(end)
                    end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        while data := await reader.read(65536):
            if is_answer and self.delay_s:
                await asyncio.sleep(self.delay_s)
            if not self.black_hole:
                writer.write(data)
                await writer.drain()
