"""What a test does to replies on their way, between a verifier and its proposer: in one process and over sockets."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from eagle2.errors import LinkDownError
from eagle2.transport.base import ProposerLink
from eagle2.transport.frames import Frame, FrameError, FrameKind, decode_text, encode_text
from eagle2.transport.messages import DraftReply
from eagle2.transport.stream import FrameStream
from eagle2.transport.wire import decode_reply, decode_step, encode_reply, encode_step
from fakes.links import WrappedLink

Edit = Callable[[DraftReply], list[DraftReply]]


class Meddler:
    """``edit`` says what is delivered instead of a reply; while it holds, nothing is delivered at all.

    Safe to use while links and proxies run.
    """

    def __init__(self) -> None:
        self.flowing = threading.Event()
        self.flowing.set()
        self.edit: Edit = lambda reply: [reply]

    def hold(self) -> None:
        self.flowing.clear()

    def release(self) -> None:
        self.flowing.set()

    def once(self, edit: Edit) -> None:
        """Use ``edit`` for the next reply that has trees, and for no other."""

        def one(reply: DraftReply) -> list[DraftReply]:
            if not reply.trees:
                return [reply]
            self.edit = lambda later: [later]
            return edit(reply)

        self.edit = one


class MeddledLink(WrappedLink):
    """A link within the process whose replies pass a meddler. It never waits."""

    def __init__(self, inner: ProposerLink, meddler: Meddler) -> None:
        super().__init__(inner)
        self._meddler = meddler
        self._ready: deque[DraftReply] = deque()

    def receive(self, timeout_s: float) -> DraftReply | None:
        if not self._meddler.flowing.is_set():
            return None
        if not self._ready:
            reply = self.inner.receive(timeout_s)
            if reply is not None:
                self._ready.extend(self._meddler.edit(reply))
        return self._ready.popleft() if self._ready else None


class ReplyProxy:
    """Listens at ``path`` for one verifier after the other and passes everything on to the proposer at ``upstream``;
    replies pass the meddler. Use as a context manager."""

    def __init__(self, path: Path, upstream: Path, meddler: Meddler) -> None:
        self.path = path
        self._upstream, self._meddler = upstream, meddler
        self._streams: list[FrameStream] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._start(self._accept)

    def __enter__(self) -> ReplyProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._meddler.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        for stream in self._streams:
            stream.shutdown()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
        for stream in self._streams:
            stream.close()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"proxy at {self.path}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                verifier, _ = self._listener.accept()
            except OSError:
                return
            proposer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            proposer.connect(str(self._upstream))
            ends = FrameStream(verifier, stall_s=10), FrameStream(proposer, stall_s=10)
            self._streams += ends
            self._start(lambda ends=ends: self._pass(ends[0], ends[1]))  # type: ignore[misc]
            self._start(lambda ends=ends: self._pass(ends[1], ends[0]))  # type: ignore[misc]

    def _pass(self, source: FrameStream, sink: FrameStream) -> None:
        try:
            while True:
                kind, body = source.read(idle=True)
                for frame in self._frames(kind, body):
                    sink.send(frame)
        except (LinkDownError, FrameError):
            source.shutdown()
            sink.shutdown()

    def _frames(self, kind: FrameKind, body: memoryview) -> list[Frame]:
        if kind is FrameKind.REPLY:
            replies = self._meddler.edit(decode_reply(body))
            self._meddler.flowing.wait()
            return [encode_reply(reply) for reply in replies]
        if kind is FrameKind.STEP:
            return [encode_step(decode_step(body))]
        return [encode_text(kind, *decode_text(body))]
