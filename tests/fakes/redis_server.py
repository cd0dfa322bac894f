"""A real Redis, or Valkey, on a free loopback port, to be killed, stopped, frozen and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

from benchmarks.kills.redis_process import find_binary
from e2e.server import free_port

_START_S = 20.0


class RedisServer:
    """One server without persistence. ``options``: further settings, as in ``{"maxmemory": "2mb"}``."""

    def __init__(self, folder: Path, *, sentinel: bool = False, config: str = "", **options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder, self._sentinel, self._config, self._options = folder, sentinel, config, options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty, at the port that it always has, and wait until it answers."""
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self._folder),
            **({} if self._sentinel else {"save": '""', "appendonly": "no"}),
            **self._options,
        }
        lines = [f"{name.replace('_', '-')} {value}" for name, value in settings.items()]
        path = self._folder / f"{self.port}.conf"  # a Sentinel writes into it
        path.write_text("\n".join([*lines, self._config, ""]))
        command = [str(find_binary()), str(path), *(["--sentinel"] if self._sentinel else [])]
        with (self._folder / f"{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        end = time.monotonic() + _START_S
        while True:
            assert self._process.poll() is None, (self._folder / f"{self.port}.log").read_text()
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        """A blocking client, for what a test does behind the store's back."""
        return redis.Redis(port=self.port, socket_timeout=5)

    def kill(self) -> None:
        """SIGKILL: connections are reset, nothing is saved."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.send_signal(signal.SIGCONT)  # a frozen one takes no SIGTERM
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process = None


@contextmanager
def redis_server(**options: str) -> Iterator[RedisServer]:
    """A server that runs; killed at the end. Skips the test where there is no binary, except in CI."""
    require_binary()
    with TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), **options)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def sentinel_of(primary: RedisServer, service: str = "mymaster") -> Iterator[RedisServer]:
    """A Sentinel that watches ``primary`` alone and fails over by command."""
    with TemporaryDirectory(prefix="sentinel-") as folder:
        config = (
            f"sentinel monitor {service} 127.0.0.1 {primary.port} 1\nsentinel down-after-milliseconds {service} 500"
        )
        server = RedisServer(Path(folder), sentinel=True, config=config)
        server.start()
        try:
            yield server
        finally:
            server.kill()


def require_binary() -> None:
    try:
        find_binary()
    except FileNotFoundError as missing:
        assert not os.environ.get("CI"), "CI needs a redis-server"
        pytest.skip(str(missing))
