"""A proposer in a process of its own, as where it is served: other memory, other threads, a socket between."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from eagle2.config import Settings
from eagle2.errors import UnavailableError
from eagle2.transport.base import ProposerLink
from eagle2.transport.node import NodeLink

_START_S = 300.0  # for imports and weights on a busy machine
_GREETING_S = 10.0


class ProposerProcess:
    """Starts a proposer and waits until it listens. It ends with ``close``, or when this process does."""

    def __init__(self, settings: Settings, fingerprint: str) -> None:
        """``fingerprint``: that of the target. Raises ``UnavailableError`` where the process does not come up."""
        self._fingerprint = fingerprint
        # The path of a Unix socket is short: pytest's folders, for one, are too long.
        self._folder = tempfile.TemporaryDirectory(prefix="eagle2-bench-")
        settings = replace(settings, pair=replace(settings.pair, socket_dir=self._folder.name))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_propose, args=(settings, theirs), name="proposer", daemon=True)
        self._process.start()
        theirs.close()
        self._socket: str = self._answer(_START_S)

    def connect(self, verifier_incarnation: int) -> ProposerLink:
        """Take its lease."""
        return NodeLink.connect(
            self._socket,
            verifier_incarnation=verifier_incarnation,
            fingerprint=self._fingerprint,
            timeout_s=_GREETING_S,
        )

    def cpu_s(self) -> float:
        """Seconds that its threads have computed since it started."""
        self._pipe.send(None)
        return float(self._answer(_GREETING_S))

    def close(self) -> None:
        self._pipe.close()  # what it waits for
        self._process.join(_GREETING_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._folder.cleanup()

    def _answer(self, timeout_s: float) -> Any:
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_GREETING_S)
            raise UnavailableError(f"The proposer's process ended with status {self._process.exitcode}.") from None
        raise UnavailableError(f"The proposer's process said nothing for {timeout_s:g} seconds.")


def _propose(settings: Settings, pipe: Connection) -> None:
    """The process: say where it listens, then what it has computed so far each time it is asked."""
    from eagle2.proposer.start import start_proposer

    service = start_proposer(settings)
    try:
        pipe.send(service.metadata()["socket"])
        while True:
            pipe.recv()
            pipe.send(time.process_time())
    except (EOFError, OSError, KeyboardInterrupt):
        service.close()
