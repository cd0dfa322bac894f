"""A Ray of its own on this machine, started for one Serve config and gone without a trace afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Every process of the cluster inherits this variable; that is how stragglers are told from other people's Rays.
_MARK = "EAGLE2_LOCAL_CLUSTER"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TQDM": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The default waits for Ray's own memory monitor to kill workers of a small machine that the model fills.
    "RAY_memory_monitor_refresh_ms": "0",
}
_OBJECT_STORE_BYTES = 80_000_000
_DRAIN_S, _SHUTDOWN_S = 15.0, 10.0


class LocalCluster:
    """Starts Ray on entry; on exit stops Serve and Ray, waits for their processes and removes their files.

    ``directory`` is the cluster's own temporary folder (short: Unix socket paths have at most 107 bytes).
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="eagle2-", dir="/tmp"))
        self._applications: list[str] = []
        self._environment = {**_QUIET, _MARK: str(self.directory)}

    def __enter__(self) -> Self:
        for name, value in self._environment.items():
            os.environ.setdefault(name, value)
        os.environ[_MARK] = str(self.directory)
        try:
            import ray
            import ray.serve  # sets up its logging on import

            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self.directory),
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
                namespace="serve",
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        with _uninterrupted():
            if ray.is_initialized():
                # A signal to the whole process group may have ended Ray already; then these calls wait for nobody.
                _bounded(self._delete_applications, _DRAIN_S)
                _bounded(ray.shutdown, _SHUTDOWN_S)
            self._reap(timeout_s=5.0)
            shutil.rmtree(self.directory, ignore_errors=True)

    def deploy(self, config: dict[str, Any]) -> None:
        """Hand a Serve config over, the way ``serve run`` does, and return without waiting for it."""
        from ray.serve._private.api import serve_start
        from ray.serve.schema import ServeDeploySchema

        schema = ServeDeploySchema.model_validate(config)
        client = serve_start(
            http_options=schema.http_options.model_dump(),
            proxy_location=schema.proxy_location,
            global_logging_config=schema.logging_config,
        )
        self._applications += [application.name for application in schema.applications]
        client.deploy_apps(schema, _blocking=False)

    def _delete_applications(self) -> None:
        """Let replicas finish what they hold. Serve's own shutdown takes longer and prints what it kills."""
        from ray import serve

        for application in self._applications:
            with contextlib.suppress(Exception):
                serve.delete(application)

    def _reap(self, timeout_s: float) -> None:
        """Wait for the cluster's processes; end those that outlive ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (left := list(self._processes())) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> Iterator[int]:
        mark = f"{_MARK}={self.directory}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0") and not _is_zombie(entry):
                    yield int(entry.name)
            except OSError:
                continue  # gone meanwhile, or somebody else's


def _bounded(step: Callable[[], None], seconds: float) -> None:
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(seconds)


def _is_zombie(process: Path) -> bool:
    return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half of a cluster behind."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
