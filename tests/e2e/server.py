"""``eagle2 serve`` as a process of its own, as tests drive it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Self

_MARK = "EAGLE2_TEST_SERVER"
_READY_S = 180.0
_STOP_S = 60.0


class Server:
    """One ``eagle2 serve``. Every process that it starts inherits a mark, so that none is missed or confused."""

    def __init__(self, log: Path, *flags: str, host: str = "127.0.0.1") -> None:
        self.port = free_port()
        self.url = f"http://{host}:{self.port}"
        self._log = log
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        # The one thread of the tests themselves is not meant for the server either.
        ours = ("RAY_", "EAGLE2_", "OMP_", "NUMBA_")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {name: value}
        if "EAGLE2_CACHE_DIR" in os.environ:
            environ["EAGLE2_CACHE_DIR"] = os.environ["EAGLE2_CACHE_DIR"]
        # As a shell without job control starts things in the background: with SIGINT ignored.
        shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
        command = [*shell, sys.executable, "-m", "eagle2.cli", "serve", "--port", str(self.port), *flags]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_until_ready(self, timeout_s: float = _READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while "Ready: " not in self.log:
            assert self.process.poll() is None, f"eagle2 serve ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"not ready after {timeout_s:g} s:\n{self.log}"
            time.sleep(0.2)
        assert self.is_ready(), self.log

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=10) as response:
                ready: bool = response.status == 200
                return ready
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self) -> dict[str, float]:
        """The counters without labels, by name, and those with labels by name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def stop(self, number: int = signal.SIGINT) -> int:
        """Interrupt the whole process group, as a terminal does, or signal the command alone; return its status."""
        if self.process.poll() is None:
            (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)
        return self.process.wait(_STOP_S)

    def processes(self, title: str = "") -> list[int]:
        """Living processes that this server started whose command line contains ``title``."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                marked = self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marked and command and title in command:  # a zombie has no command line
                found.append(int(entry.name))
        return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
