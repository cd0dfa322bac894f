"""The proposer as a plain service: a socket for one verifier at a time, and its health. Knows nothing of Ray."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

from eagle2.errors import ConfigError, UnavailableError
from eagle2.transport.base import DraftHandler
from eagle2.transport.messages import DraftReply, DraftStep
from eagle2.transport.server import NodeServer


class ProposerService:
    """Serves ``handler`` at a socket in ``socket_dir``, named after ``incarnation``.

    ``incarnation`` is drawn anew by each process and is the one that the handler writes into its replies.
    ``fingerprint`` names the model that is drafted for: a verifier of another one is refused. ``socket_dir`` is made
    with mode 0700 and must belong to this user alone. A handler that fails ``max_failures`` times in a row is broken:
    then ``check_health`` raises and the replica is replaced.
    """

    def __init__(
        self,
        handler: DraftHandler,
        *,
        socket_dir: str | Path,
        incarnation: int,
        fingerprint: str,
        max_failures: int = 3,
    ) -> None:
        self._guard = _Guard(handler, incarnation)
        self._directory = Path(socket_dir)
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._max_failures = max_failures
        self._server: NodeServer | None = None

    @property
    def socket_path(self) -> Path:
        return self._directory / f"{self._incarnation:x}.sock"

    def start(self) -> None:
        """Begin to listen. Raises ``ConfigError`` when the socket cannot be made, also for a path too long."""
        assert self._server is None, "the service is started already"
        _make_private(self._directory)
        self._server = NodeServer(self.socket_path, self._guard, self._incarnation, fingerprint=self._fingerprint)

    def close(self) -> None:
        """Close the socket and all connections. May be called again, or without a start."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def metadata(self) -> dict[str, str]:
        """What a verifier needs in order to find this proposer and to know it again."""
        return {"socket": str(self.socket_path), "incarnation": str(self._incarnation)}

    def check_health(self) -> None:
        """Raises ``UnavailableError`` when this process can draft no more and should be replaced."""
        if self._server is None or not self._server.alive:
            raise UnavailableError(f"the proposer does not listen at {self.socket_path}")
        failures, error = self._guard.failures, self._guard.last_error
        if failures >= self._max_failures:
            raise UnavailableError(f"the draft handler failed {failures} times in a row, last with {error!r}")

    def stats(self) -> dict[str, float]:
        """Counters since the start, and whether a verifier holds the lease (``leased``, 0 or 1)."""
        counts = self._guard.counts()
        if self._server is not None:
            counts.update(self._server.counts())
        leased = self._server is not None and self._server.leased_to is not None
        return {**{name: float(count) for name, count in counts.items()}, "leased": float(leased)}


class _Guard:
    """A ``DraftHandler`` that watches another one. Written by the thread of the lease, read by any."""

    def __init__(self, handler: DraftHandler, incarnation: int) -> None:
        self.failures = 0  # in a row
        self.last_error: Exception | None = None
        self._handler = handler
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._counts = {"steps": 0, "entries": 0, "rows": 0, "drafted_tokens": 0}

    def handle(self, step: DraftStep) -> DraftReply:
        try:
            reply = self._handler.handle(step)
            if reply.incarnation != self._incarnation:
                # The verifier would drop every reply in silence and never draft again.
                raise RuntimeError(
                    f"the handler signs its replies with the incarnation {reply.incarnation}, not {self._incarnation}"
                )
        except Exception as error:
            self._note(error)
            raise
        with self._lock:
            self.failures = 0
            self._counts["steps"] += 1
            self._counts["entries"] += len(step.entries)
            self._counts["rows"] += sum(entry.tokens.shape[0] for entry in step.entries)
            self._counts["drafted_tokens"] += sum(tree.tokens.shape[0] for tree in reply.trees)
        return reply

    def reset(self) -> None:
        try:
            self._handler.reset()
        except Exception as error:
            self._note(error)
            raise

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _note(self, error: Exception) -> None:
        with self._lock:
            self.failures += 1
            self.last_error = error


def _make_private(directory: Path) -> None:
    """Make ``directory`` for this user alone; refuse one that others may write to."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigError(
            f"the socket directory {directory} belongs to user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):o}; it must be this user's, and nobody else may write to it"
        )
