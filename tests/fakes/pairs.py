"""A proposer and its verifiers on one node, for tests: everything that was opened is closed at the end."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from eagle2.transport.base import DraftHandler
from eagle2.transport.frames import FrameKind, encode_text
from eagle2.transport.messages import DraftEntry, DraftStep
from eagle2.transport.node import NodeLink
from eagle2.transport.server import NodeServer
from fakes.drafts import OracleHandler


class Pair:
    """A socket path of its own and short ways to serve at it and to connect to it. Use as a context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        # pytest's own temporary paths are longer than a socket address
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="e2")))
        self.path = self.folder / "p.sock"

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def serve(self, handler: DraftHandler | None = None, *, stall_s: float = 2.0) -> NodeServer:
        """A proposer of incarnation 9 for the model ``llama``; without a handler it drafts the root plus one."""
        handler = handler or OracleHandler(lambda context: [context[-1] + 1], incarnation=9)
        server = NodeServer(self.path, handler, 9, fingerprint="llama", stall_s=stall_s)
        self._stack.callback(server.close)
        return server

    def connect(
        self, incarnation: int = 3, *, fingerprint: str = "llama", timeout_s: float = 10.0, stall_s: float = 2.0
    ) -> NodeLink:
        link = NodeLink.connect(
            self.path, verifier_incarnation=incarnation, fingerprint=fingerprint, timeout_s=timeout_s, stall_s=stall_s
        )
        self._stack.callback(link.close)
        return link

    def impersonate(self, answer: bytes) -> None:
        """Serve with something that reads one greeting, answers ``answer`` and then does nothing."""
        self._stack.callback(_Impostor(self.path, answer).close)


def step_of(number: int, token: int = 4, rows: int = 1, hidden: int = 8) -> DraftStep:
    tokens = torch.full((rows,), token)
    return DraftStep(3, number, 2, 2, 4, (DraftEntry(1, number, 0, torch.zeros(rows, hidden), tokens),))


def answered(link: NodeLink, number: int) -> bool:
    link.send(step_of(number))
    reply = link.receive(10.0)
    return reply is not None and reply.step == number


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def raw_peer(path: str | Path, *data: bytes) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(10)
    peer.connect(str(path))
    for part in data:
        peer.sendall(part)
    return peer


def ended(peer: socket.socket) -> bool:
    """Whether the other side closes without another word. A reset is an end with something left unread."""
    with peer:
        try:
            return peer.recv(1) == b""
        except ConnectionResetError:
            return True


class _Impostor:
    """Listens like a proposer, reads the greeting, answers with given bytes and then does nothing."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._answer = answer
        self._peers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._thread.join()
        for one in (self._listener, *self._peers):
            one.close()

    def _run(self) -> None:
        peer, _ = self._listener.accept()
        peer.recv(1024)
        peer.sendall(self._answer)
        self._peers.append(peer)


WELCOME = b"".join(encode_text(FrameKind.WELCOME, 9, "llama"))
