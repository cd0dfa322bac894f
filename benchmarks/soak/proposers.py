"""Proposers that a soak kills and starts again: in a thread of this process, or in a process of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import threading
from multiprocessing.connection import Connection
from typing import Any, Protocol

from eagle2.config import Settings, load_settings
from eagle2.engine.assemble import Checkpoint, load_draft_runner
from eagle2.engine.draft import DraftRunner
from eagle2.errors import LinkDownError, ModelError
from eagle2.proposer.service import ProposerService
from eagle2.proposer.start import start_proposer
from eagle2.transport.base import ProposerLink
from eagle2.transport.node import NodeLink, ProposerBusyError

_CONNECT_S = 5.0


class Proposer(Protocol):
    """One at a time, behind a socket; another one after each ``restart``."""

    def restart(self) -> None:
        """Kill it, if it is there, and start another one with a new incarnation."""

    def connect(self) -> ProposerLink | None:
        """A link to the present one; None while it does not listen."""

    def close(self) -> None: ...


class ThreadProposer:
    """A service in this process; ``runner`` is the present one's."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint) -> None:
        self._settings, self._checkpoint = settings, checkpoint
        self.runner: DraftRunner
        self._service: ProposerService | None = None
        self._lock = threading.Lock()

    def restart(self) -> None:
        with self._lock:
            if self._service is not None:
                self._service.close()
            incarnation = secrets.randbits(63)
            self.runner = load_draft_runner(self._settings, self._checkpoint, incarnation)
            assert self._settings.pair.socket_dir is not None
            self._service = ProposerService(
                self.runner,
                socket_dir=self._settings.pair.socket_dir,
                incarnation=incarnation,
                fingerprint=self._checkpoint.fingerprint,
            )
            self._service.start()

    def connect(self) -> ProposerLink | None:
        with self._lock:
            path = None if self._service is None else self._service.metadata()["socket"]
        return None if path is None else _connect(path, self._checkpoint.fingerprint)

    def close(self) -> None:
        with self._lock:
            if self._service is not None:
                self._service.close()
                self._service = None


class ProcessProposer:
    """A process of its own, as in a deployment; killed without notice."""

    def __init__(self, settings: Settings, fingerprint: str) -> None:
        self._settings, self._fingerprint = settings, fingerprint
        self._process: multiprocessing.process.BaseProcess | None = None
        self._said: Connection | None = None
        self._socket: str | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def restart(self) -> None:
        with self._lock:
            self._kill()
            context = multiprocessing.get_context("spawn")
            self._said, says = context.Pipe(duplex=False)
            self._process = context.Process(target=_serve, args=(self._settings.as_dict(), says), daemon=True)
            self._process.start()
            says.close()

    def connect(self) -> ProposerLink | None:
        with self._lock:
            if self._socket is None and self._said is not None and self._said.poll():
                with contextlib.suppress(EOFError):
                    self._socket = self._said.recv()
            path = self._socket
        return None if path is None else _connect(path, self._fingerprint)

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._said is not None:
            self._said.close()
        self._process = self._said = self._socket = None


def _connect(path: str, fingerprint: str) -> ProposerLink | None:
    try:
        return NodeLink.connect(path, verifier_incarnation=1, fingerprint=fingerprint, timeout_s=_CONNECT_S)
    except (LinkDownError, ProposerBusyError, ModelError):
        return None


def _serve(settings: dict[str, dict[str, Any]], says: Connection) -> None:
    """The process: say where the socket is, then draft until it is killed, or the other process is."""
    service = start_proposer(load_settings(settings))
    says.send(service.metadata()["socket"])
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
