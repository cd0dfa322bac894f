"""Either end of a pair as a process of its own, to be killed: ``python processes.py ROLE SOCKET_PATH``."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROPOSER_INCARNATION = 77
FINGERPRINT = "fake"


@contextmanager
def running(role: str, socket_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``role`` (``proposer`` or ``verifier``) and wait until it is ready; killed at the end."""
    command = [sys.executable, __file__, role, str(socket_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def _propose(path: str) -> None:
    from eagle2.transport.server import NodeServer
    from fakes.drafts import OracleHandler

    def continuation(context: list[int]) -> list[int]:
        if context[-1] == 0:
            threading.Event().wait()  # the step that the test kills it in
        return [context[-1] + 1]

    NodeServer(
        path,
        OracleHandler(continuation, incarnation=PROPOSER_INCARNATION),
        PROPOSER_INCARNATION,
        fingerprint=FINGERPRINT,
    )


def _verify(path: str) -> None:
    from eagle2.transport.node import NodeLink

    NodeLink.connect(path, verifier_incarnation=6, fingerprint=FINGERPRINT, timeout_s=30)


if __name__ == "__main__":
    {"proposer": _propose, "verifier": _verify}[sys.argv[1]](sys.argv[2])
    print("ready", flush=True)
    threading.Event().wait()
