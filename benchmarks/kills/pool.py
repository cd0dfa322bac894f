"""The service under test: its processes by kind, whether all of them are there and at work, and their ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from benchmarks.kills.clients import ROUTER
from benchmarks.kills.redis_process import RedisProcess
from eagle2.operations.local_cluster import LocalCluster
from eagle2.operations.serve_command import read_config, settings_of, with_counts, with_settings
from eagle2.router.pinning import pin
from eagle2.router.serve_fleet import ServeFleet
from eagle2.telemetry import metrics

Kind = Literal["verifier", "proposer", "router", "redis"]

_DEPLOYMENTS: dict[str, str] = {"verifier": "TargetVerifier", "proposer": "DraftProposer", "router": "Router"}
_POLL_S = 0.2
_LEFT = re.compile(r"request (\S+)\.[0-9a-f]{12} leaves (\S+): (\w+)")


@dataclass(frozen=True, slots=True)
class Member:
    """One process. ``uid`` is Serve's name of the replica."""

    kind: Kind
    uid: str
    pid: int


class Pool:
    """``pairs`` pairs of verifier and proposer, and ``routers`` routers with a Redis in common, on ``cluster``."""

    def __init__(self, cluster: LocalCluster, redis: RedisProcess, *, pairs: int, routers: int) -> None:
        self._cluster, self._redis = cluster, redis
        self._counts = {"verifier": pairs, "proposer": pairs, "router": routers}
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._fleet: ServeFleet | None = None
        self._ready: set[str] = set()
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=10, trust_env=False)

    def deploy(self, target: Path, head: Path, engine: Mapping[str, Any]) -> None:
        """Returns before anything runs."""
        document = with_counts(read_config(None), pairs=self._counts["verifier"], routers=self._counts["router"])
        model = {"target": str(target), "draft": str(head), "dtype": "float32"}
        flags: dict[str, Mapping[str, Any]] = {"model": model, "engine": engine, "http": {"port": self.port}}
        flags["session"] = {"store": self._redis.url}
        self._cluster.deploy(with_settings(document, settings_of(document, flags), self._cluster.directory))

    def members(self) -> list[Member]:
        """All that run, as Serve's controller knows them."""
        from ray.serve.context import _get_global_client

        controller: Any = _get_global_client()
        details = controller.get_serve_details()
        deployments = details["applications"].get("eagle2", {}).get("deployments", {})
        return [
            Member(kind, str(one["replica_id"]), int(one["pid"]))  # type: ignore[arg-type]
            for kind, name in _DEPLOYMENTS.items()
            for one in deployments.get(name, {}).get("replicas", ())
            if str(getattr(one["state"], "value", one["state"])) == "RUNNING"
        ]

    async def whole(self, without: str | None, timeout_s: float) -> None:
        """Wait until every process runs, is paired and answers, and none is ``without``. Raises TimeoutError."""
        limit = time.monotonic() + timeout_s
        while (missing := await self._missing(without)) is not None:
            if time.monotonic() > limit:
                raise TimeoutError(f"The service is not whole after {timeout_s:g} s: {missing}.")
            await asyncio.sleep(_POLL_S)

    def kill(self, member: Member, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, if that process is what Serve says."""
        command = Path(f"/proc/{member.pid}/cmdline").read_bytes()
        assert b"ray::ServeReplica:eagle2" in command, f"{member} is {command!r}"
        os.kill(member.pid, how)

    def redis_was_lost(self) -> None:
        """Every router has to say anew that it is ready, with its store."""
        self._ready.clear()

    def moves(self) -> dict[str, list[tuple[str, str]]]:
        """By a client's request id: which replicas its stream has left, and why, as routers have logged it."""
        found: dict[str, list[tuple[str, str]]] = {}
        for path in (self._cluster.directory / "session_latest" / "logs").rglob("*"):
            if path.is_file() and not path.is_symlink():
                for name, uid, reason in _LEFT.findall(path.read_text(errors="replace")):
                    if (uid, reason) not in found.setdefault(name, []):
                        found[name].append((uid, reason))
        return found

    async def close(self) -> None:
        await self._client.aclose()

    async def _missing(self, without: str | None) -> str | None:
        """What is not there yet."""
        members = await asyncio.to_thread(self.members)
        for kind, count in self._counts.items():
            running = {member.uid for member in members if member.kind == kind} - {without}
            if len(running) != count:
                return f"{len(running)} of {count} {kind}s run"
        return await self._unpaired(without) or await self._silent({m.uid for m in members if m.kind == "router"})

    async def _unpaired(self, without: str | None) -> str | None:
        from ray import serve

        handle = serve.get_deployment_handle(_DEPLOYMENTS["verifier"], "eagle2")
        if self._fleet is None:
            self._fleet = ServeFleet(handle, drain_s=20.0)
        replicas = [replica for replica in self._fleet.replicas() if replica.uid != without]
        if len(replicas) != self._counts["verifier"]:
            return f"{len(replicas)} verifiers are known"
        for replica in replicas:
            try:
                async with asyncio.timeout(10):
                    stats: dict[str, float] = await handle.options(session_id=pin(replica)).stats.remote()
            except Exception as error:
                return f"{replica.uid} has no figures: {type(error).__name__}"
            if not stats.get(metrics.PROPOSER_UP.sample()):
                return f"{replica.uid} has no proposer"
        return None

    async def _silent(self, routers: set[str]) -> str | None:
        """Routers that have not said that they are ready. Serve's proxy chooses who is asked, so all answers count."""
        for _ in range(4):
            if routers <= self._ready:
                break
            try:
                reply = await self._client.get("/ready")
            except httpx.TransportError:
                continue
            if reply.status_code == 200 and "degraded" not in reply.json():
                self._ready.add(reply.headers.get(ROUTER, ""))
        silent = routers - self._ready
        return f"not ready: the routers {', '.join(sorted(silent))}" if silent else None
