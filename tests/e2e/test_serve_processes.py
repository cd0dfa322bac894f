"""What the processes of a running server hold, and what happens when one of them is killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
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
    sockets = [path for path in folder.rglob("*") if path.is_socket()]
    assert sockets
    assert all(path.parent.stat().st_mode & 0o077 == 0 for path in sockets)
    assert all(path.stat().st_mode & 0o077 == 0 for path in sockets)


def test_a_stream_survives_its_proposer_and_drafts_again(server: Server) -> None:
    """The same tokens as without speculation, plain ones while there is no proposer, drafted ones once it is back."""
    events = _stream(server, max_tokens=60000)
    seen = [next(events)]
    victim = _replica(server, "DraftProposer")
    os.kill(victim, signal.SIGKILL)
    _until(lambda: _metric(server, "proposer_up") == 0, events, seen)
    while_down = _metric(server, "spec_decode_num_drafts_total")
    _until(lambda: _metric(server, "proposer_up") == 1, events, seen)
    _until(lambda: _metric(server, "spec_decode_num_drafts_total") > while_down + 10, events, seen)
    assert _replica(server, "DraftProposer") != victim
    assert _metric(server, "num_requests_running") == 1, "it was this very stream that was drafted for"
    events.close()

    text = _text(seen)
    plain = _text(list(_stream(server, max_tokens=sum(len(e["choices"]) for e in seen), speculation=False)))
    common = min(len(text), len(plain))
    assert common > 200
    assert text[:common] == plain[:common]


def test_a_killed_verifier_is_replaced(server: Server) -> None:
    victim = _replica(server, "TargetVerifier")
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if server.is_ready() and server.processes("ServeReplica:eagle2:TargetVerifier") not in ([], [victim]):
            break
    assert _text(list(_stream(server, max_tokens=8)))
    assert _replica(server, "TargetVerifier") != victim


def _until(condition: Callable[[], bool], events: Iterator[dict[str, Any]], seen: list[dict[str, Any]]) -> None:
    """Read on, so that the stream is not held up, until the condition holds."""
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in 90 s"
        seen += itertools.islice(events, 50)


def _metric(server: Server, name: str) -> float:
    return server.metrics().get(f"eagle2_{name}", 0.0)


def _stream(server: Server, max_tokens: int, **more: object) -> Iterator[dict[str, Any]]:
    body = {"prompt": "the rest in there", "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, **more}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                yield json.loads(data)


def _text(events: Iterable[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))
