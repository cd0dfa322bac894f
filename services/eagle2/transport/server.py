"""The proposer's end of a pair on one node: a Unix-domain socket that one verifier at a time may use."""

from __future__ import annotations

import logging
import socket
import stat
import threading
import time
from pathlib import Path

from eagle2.errors import ConfigError, LinkDownError
from eagle2.transport.base import DraftHandler
from eagle2.transport.frames import Frame, FrameError, FrameKind, VersionError, decode_text, encode_text
from eagle2.transport.stream import FrameStream, check_path
from eagle2.transport.wire import decode_step, encode_reply

_LOGGER = logging.getLogger(__name__)
_JOIN_S = 5.0


class NodeServer:
    """Listens at ``path`` (mode 0600) and hands the steps of the verifier that holds the lease to ``handler``.

    The lease is exclusive and lasts as long as the connection: a silent verifier keeps it, a dead one loses it, since
    the kernel closes its socket. Each new lease resets the handler first. The handler runs in the thread of the
    leased connection, so never in two threads at once. If it raises, the connection is closed, the verifier decodes
    plainly and comes back for a new lease.
    """

    def __init__(
        self, path: str | Path, handler: DraftHandler, incarnation: int, *, fingerprint: str, stall_s: float = 2.0
    ) -> None:
        self.path = check_path(path)
        self.incarnation = incarnation
        self._fingerprint = fingerprint
        self._handler = handler
        self._stall_s = stall_s
        self._lock = threading.Condition()
        self._holder: tuple[int, FrameStream] | None = None
        self._peers: dict[threading.Thread, FrameStream] = {}
        self._counts = {"leases": 0, "busy": 0, "mismatches": 0, "bad_frames": 0, "handler_errors": 0}
        self._stopping = False
        self._listener = _listen(Path(self.path))
        self._acceptor = threading.Thread(target=self._accept, name=f"accept at {self.path}", daemon=True)
        self._acceptor.start()

    @property
    def alive(self) -> bool:
        """Whether new verifiers are still let in."""
        return self._acceptor.is_alive() and not self._stopping

    @property
    def leased_to(self) -> int | None:
        """Incarnation of the verifier that holds the lease."""
        holder = self._holder
        return holder[0] if holder else None

    def counts(self) -> dict[str, int]:
        """Events since the start: leases, busy answers, model mismatches, bad frames, errors of the handler."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Close every connection, wait for the handler's step to end, remove the socket file. May be called again."""
        self._stopping = True
        _shutdown(self._listener)
        self._acceptor.join(_JOIN_S)
        with self._lock:
            peers = list(self._peers.items())
        for _, stream in peers:
            stream.shutdown()
        deadline = time.monotonic() + _JOIN_S
        for thread, _ in peers:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()
        Path(self.path).unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._stopping:
                    _LOGGER.error("the socket at %s takes no more connections: %s", self.path, error)
                return
            stream = FrameStream(connection, stall_s=self._stall_s)
            thread = threading.Thread(target=self._attend, args=(stream,), name=f"verifier at {self.path}", daemon=True)
            with self._lock:
                self._peers[thread] = stream
            thread.start()

    def _attend(self, stream: FrameStream) -> None:
        """One connection from its greeting to its end."""
        try:
            if self._greet(stream):
                try:
                    self._serve(stream)
                finally:
                    # Before the connection closes: a verifier that sees the end may be back at once.
                    self._release()
        except LinkDownError as error:
            _LOGGER.info("a verifier left %s: %s", self.path, error)
        except FrameError as error:
            self._count("bad_frames")
            _LOGGER.warning("a connection to %s was closed: %s", self.path, error)
        finally:
            stream.shutdown()
            with self._lock:
                self._peers.pop(threading.current_thread(), None)
            stream.close()

    def _greet(self, stream: FrameStream) -> bool:
        """Answer a HELLO; True when it got the lease."""
        try:
            kind, body = stream.read(idle=False)
        except VersionError:
            # Any frame of ours tells the peer which version is spoken here.
            stream.send(encode_text(FrameKind.MISMATCH, self.incarnation, self._fingerprint))
            raise
        if kind is not FrameKind.HELLO:
            raise FrameError(f"a connection opened with a frame of the kind {kind.name} instead of a greeting")
        incarnation, fingerprint = decode_text(body)
        if fingerprint != self._fingerprint:
            self._count("mismatches")
            stream.send(encode_text(FrameKind.MISMATCH, self.incarnation, self._fingerprint))
            return False
        holder = self._lease(incarnation, stream)
        if holder is not None:
            self._count("busy")
            stream.send(encode_text(FrameKind.BUSY, holder, ""))
            return False
        return True

    def _lease(self, incarnation: int, stream: FrameStream) -> int | None:
        """Take the lease; otherwise the incarnation of its holder.

        A holder that has hung up is about to lose it (its last step may still be in hand), so that is waited for.
        """
        deadline = time.monotonic() + self._stall_s
        with self._lock:
            while self._holder is not None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._holder[1].hung_up():
                    return self._holder[0]
                self._lock.wait(left)
            self._holder = (incarnation, stream)
            self._counts["leases"] += 1
        return None

    def _release(self) -> None:
        with self._lock:
            self._holder = None
            self._lock.notify_all()

    def _serve(self, stream: FrameStream) -> None:
        try:
            self._handler.reset()
        except Exception:
            self._failed("could not be reset")
            return
        stream.send(encode_text(FrameKind.WELCOME, self.incarnation, self._fingerprint))
        while True:
            kind, body = stream.read(idle=True)
            if kind is not FrameKind.STEP:
                raise FrameError(f"a verifier sent a frame of the kind {kind.name} instead of a step")
            step = decode_step(body)
            try:
                reply: Frame = encode_reply(self._handler.handle(step))
            except Exception:
                self._failed(f"failed on step {step.step}")
                return
            stream.send(reply)

    def _failed(self, what: str) -> None:
        self._count("handler_errors")
        _LOGGER.exception("the draft handler at %s %s; its verifier is sent away", self.path, what)

    def _count(self, event: str) -> None:
        with self._lock:
            self._counts[event] += 1


def _listen(path: Path) -> socket.socket:
    """A listening socket at ``path`` that only this user may open. Raises ``ConfigError`` when the path is taken."""
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # before listen: nobody can have connected under the old mode
        listener.listen(16)
    except OSError as error:
        listener.close()
        raise ConfigError(f"no socket can be opened at {path}: {error}") from error
    return listener


def _clear(path: Path) -> None:
    """Remove the socket file of a process that is gone."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"the socket at {path} cannot be looked at: {error}") from error
    raise ConfigError(f"another process listens at {path}")


def _shutdown(listener: socket.socket) -> None:
    try:
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept, which close would not
    except OSError:
        return
