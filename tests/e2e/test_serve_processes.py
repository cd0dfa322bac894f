"""What the processes of a running server hold, and what happens when one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def _replica(server: Server, name: str) -> int:
    (pid,) = server.processes(f"ServeReplica:eagle2:{name}")
    return pid


def _maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_the_router_has_no_torch_in_it(server: Server) -> None:
    assert not _maps_torch(_replica(server, "Router"))
    assert _maps_torch(_replica(server, "TargetVerifier")), "the check itself must see torch where it is"


def test_the_pair_talks_over_a_private_socket(server: Server) -> None:
    folders = {
        Path(v.partition("=")[2]) / "pairs"
        for v in Path(f"/proc/{_replica(server, 'DraftProposer')}/environ").read_bytes().decode().split("\0")
        if v.startswith("EAGLE2_LOCAL_CLUSTER=")
    }
    (folder,) = folders
    sockets = [path for path in folder.iterdir() if path.is_socket()]
    assert sockets
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in sockets)


def test_streams_survive_a_killed_proposer_and_draft_again(server: Server) -> None:
    expected = _text(_stream(server, max_tokens=1200))
    events = _stream(server, max_tokens=1200)
    seen = [next(events) for _ in range(5)]
    drafts = _drafts(server)
    victim = _replica(server, "DraftProposer")
    os.kill(victim, signal.SIGKILL)
    assert _text(iter([*seen, *events])) == expected, "the same tokens, with and without a proposer"

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before = _drafts(server)
        _text(_stream(server, max_tokens=16))
        if _drafts(server) > before and server.processes("ServeReplica:eagle2:DraftProposer") not in ([], [victim]):
            break
        time.sleep(0.5)
    else:
        pytest.fail(f"drafting did not resume; drafts before the kill {drafts}, now {_drafts(server)}")


def _drafts(server: Server) -> float:
    return next(value for name, value in server.metrics().items() if "spec_decode_num_drafts_total" in name)


def _stream(server: Server, max_tokens: int) -> Iterator[dict[str, Any]]:
    body = {
        "prompt": "the rest in there",
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                yield json.loads(data)


def _text(events: Iterator[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))
