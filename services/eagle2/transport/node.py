"""The verifier's end of a pair on one node: a Unix-domain socket to a proposer.

Greeting: the verifier says HELLO with its incarnation and the fingerprint of its model. The proposer answers WELCOME
(the lease is granted), BUSY (another verifier holds it) or MISMATCH (another model), the last two before it closes.
Then every STEP is answered by one REPLY, in order.
"""

from __future__ import annotations

import queue
import socket
import threading
from pathlib import Path

from eagle2.errors import LinkDownError, ModelError, UnavailableError
from eagle2.transport.frames import FrameError, FrameKind, decode_text, encode_text
from eagle2.transport.messages import DraftReply, DraftStep
from eagle2.transport.stream import FrameStream, check_path
from eagle2.transport.wire import decode_reply, encode_step


class ProposerBusyError(UnavailableError):
    """Another verifier holds the lease of the proposer."""


class NodeLink:
    """A ``ProposerLink`` over a Unix-domain socket; made by ``connect``.

    A thread of its own reads the replies as they come, so that a proposer never blocks on a verifier that is busy
    sending, and a proposer that dies is noticed at once, whatever the engine does meanwhile.
    """

    def __init__(self, stream: FrameStream, incarnation: int, path: str) -> None:
        self.incarnation = incarnation
        self._stream = stream
        self._path = path
        self._down: str | None = None
        # Replies in order; None after the last one.
        self._replies: queue.SimpleQueue[DraftReply | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"replies of {path}", daemon=True)
        self._reader.start()

    @classmethod
    def connect(
        cls, path: str | Path, *, verifier_incarnation: int, fingerprint: str, timeout_s: float, stall_s: float = 2.0
    ) -> NodeLink:
        """Take the lease of the proposer that listens at ``path``.

        ``timeout_s`` bounds every wait of the greeting, ``stall_s`` how long a frame may stand still later. Raises
        ``LinkDownError`` when nobody listens or answers in time, ``ProposerBusyError`` when another verifier holds
        the lease, ``ModelError`` when the proposer drafts for another model.
        """
        address = check_path(path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            try:
                connection.connect(address)
            except OSError as error:
                raise LinkDownError(f"no proposer listens at {address}: {error}") from error
            stream = FrameStream(connection, stall_s=stall_s)
            stream.set_read_deadline(timeout_s)
            incarnation = _greet(stream, address, verifier_incarnation, fingerprint)
            stream.set_read_deadline(stall_s)
        except BaseException:
            connection.close()
            raise
        return cls(stream, incarnation, address)

    def send(self, step: DraftStep) -> None:
        """Hand over a step. Raises ``LinkDownError`` when the proposer is gone or takes nothing for ``stall_s``."""
        if self._down is not None:
            raise LinkDownError(self._down)
        try:
            self._stream.send(encode_step(step))
        except LinkDownError as error:
            self._down = f"the link to {self._path} is down: {error}"
            self._stream.shutdown()  # half a frame may be out: nothing can follow it
            raise LinkDownError(self._down) from error

    def receive(self, timeout_s: float) -> DraftReply | None:
        """The next reply, None when none came within ``timeout_s``.

        Replies that arrived before the proposer went away are still delivered; then it raises ``LinkDownError``.
        """
        try:
            reply = self._replies.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if reply is None:
            self._replies.put(None)  # for whoever asks again
            raise LinkDownError(self._down or f"the link to {self._path} is down")
        return reply

    def close(self) -> None:
        """Give the lease back. May be called again."""
        self._down = self._down or f"the link to {self._path} is closed"
        self._stream.shutdown()
        self._reader.join()
        self._stream.close()

    def _read(self) -> None:
        try:
            while True:
                kind, body = self._stream.read(idle=True)
                if kind is not FrameKind.REPLY:
                    raise FrameError(f"the proposer sent a frame of the kind {kind.name} instead of a reply")
                self._replies.put(decode_reply(body))
        except (LinkDownError, FrameError) as error:
            self._down = self._down or f"the link to {self._path} is down: {error}"
        finally:
            self._stream.shutdown()
            self._replies.put(None)


def _greet(stream: FrameStream, path: str, incarnation: int, fingerprint: str) -> int:
    """Say hello; the proposer's incarnation once the lease is granted."""
    try:
        stream.send(encode_text(FrameKind.HELLO, incarnation, fingerprint))
        kind, body = stream.read(idle=False)
        peer, text = decode_text(body)
    except (LinkDownError, FrameError) as error:
        raise LinkDownError(f"the proposer at {path} did not answer the greeting: {error}") from error
    if kind is FrameKind.BUSY:
        raise ProposerBusyError(f"the proposer at {path} is leased to the verifier {peer:x}")
    if kind is FrameKind.MISMATCH:
        raise ModelError(f"the proposer at {path} drafts for the model {text!r}, this verifier runs {fingerprint!r}")
    if kind is not FrameKind.WELCOME:
        raise LinkDownError(f"the proposer at {path} answered the greeting with a frame of the kind {kind.name}")
    return peer
