"""B37: no address of a request is opened, and keys, prompts and session names stand in no log, metric or store."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle2.router.api import create_app
from eagle2.router.buckets import Level, LocalBuckets
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet
from eagle2.router.tenants import KeyFile, key_line
from eagle2.session.breaker import GuardedStore
from eagle2.session.memory import MemorySessionStore
from fakes.server import serving
from fakes.verifier import ForcedVerifier, describe

KEY = "sk-CANARY-123"
PROMPT = "CANARY-PROMPT-9 " * 20  # long enough for prefixes of it to be remembered
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]}
HEADERS = {"Authorization": f"Bearer {KEY}", "X-Session-Id": "CANARY-SESS"}


class NamedBuckets(LocalBuckets):
    """Shared buckets whose names are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    async def take(self, name: str, cost: float, per_minute: int, *, debt: bool = False) -> Level:
        self.names.add(name)
        return await super().take(name, cost, per_minute, debt=debt)


class Means:
    """Everything that one router writes to."""

    def __init__(self, verifier: ForcedVerifier, folder: Path) -> None:
        path = folder / "keys"
        path.write_text(f"{key_line('CANARY-TENANT', KEY)} requests_per_minute=100 tokens_per_minute=100000")
        self.sessions = MemorySessionStore(60)
        self.buckets = NamedBuckets()
        self.app = create_app(
            SingleFleet(verifier, 256),
            RouterSettings(),
            store=GuardedStore(self.sessions, 2.0),
            keys=KeyFile(path),
            shared_buckets=self.buckets,
        )

    def stored(self) -> list[str]:
        contents = self.sessions._contents
        return [*contents.sessions, *contents.prefixes, *map(str, contents.leases), *self.buckets.names]


def wait_for(condition: Any) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture(params=[logging.DEBUG, logging.INFO])
def logs(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Everything that any logger says, those of libraries that keep to themselves too."""
    level: int = request.param
    names = [name for name in logging.root.manager.loggerDict if not name.startswith(("httpx", "httpcore"))]
    before = [(log, log.level, log.propagate, log.disabled) for log in map(logging.getLogger, names)]
    caplog.set_level(level)
    for log, *_ in before:
        log.setLevel(level)
        log.propagate, log.disabled = True, False
    yield caplog
    for log, old_level, propagate, disabled in before:
        log.setLevel(old_level)
        log.propagate, log.disabled = propagate, disabled


@pytest.mark.parametrize("case", ["success", "stream", "400", "400 value", "401", "500", "500 in a stream", "cancel"])
def test_b37_nothing_private_is_written(case: str, logs: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    verifier = ForcedVerifier(
        endless=case == "cancel",
        pause_s=0.01,
        before=RuntimeError(PROMPT) if case == "500" else None,
        after=RuntimeError(PROMPT) if case == "500 in a stream" else None,
        description=describe(max_model_len=2048),
    )
    means = Means(verifier, tmp_path)
    stream, headers, body, status = "stream" in case or case == "cancel", HEADERS, CHAT, 200
    if case == "400":
        body, status = {"messages": [{"role": "user", "content": {"CANARY": PROMPT}}]}, 400
    elif case == "400 value":
        body, status = {**CHAT, "seed": PROMPT, "stop": [PROMPT * 9]}, 400
    elif case == "401":
        headers, status = {**HEADERS, "Authorization": "Bearer sk-CANARY-wrong"}, 401
    elif case == "500":
        status = 500
    body = {**body, "stream": stream, "user": "CANARY-USER", "metadata": {"a": "CANARY-META"}}
    with serving(means.app) as url, httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == status
            text = ""
            for count, line in enumerate(response.iter_lines()):
                text += line
                if case == "cancel" and count > 10:
                    break
        wait_for(lambda: verifier.running == 0)
        said = text + str(response.headers)
        metrics = httpx.get(url + "/metrics", headers=HEADERS).text
    assert "eagle2_requests_total" in metrics
    ours = [record for record in logs.records if not record.name.startswith(("httpx", "httpcore"))]
    logged = "\n".join(logging.Formatter("%(name)s %(message)s").format(record) for record in ours)
    if case.startswith("500"):
        assert "RuntimeError" in logged
        assert headers["X-Session-Id"] not in logged
    assert "CANARY" not in logged
    assert "CANARY" not in metrics
    assert "CANARY" not in said
    stored = means.stored()
    assert not any("CANARY" in name for name in stored)
    if case in ("success", "stream", "cancel"):
        # The positive control: a session, prefixes and two buckets were written.
        assert len(means.sessions._contents.sessions) == 1
        assert means.sessions._contents.prefixes
        assert len(means.buckets.names) == 2


@contextmanager
def metadata_service() -> Iterator[tuple[str, list[Any]]]:
    """Something that would answer with a redirect; yields its address and who has come."""
    visitors: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    visitor, _ = listener.accept()
                except OSError:
                    return
                visitors.append(visitor)
                visitor.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n")
                visitor.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", visitors
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_b37_no_address_is_opened() -> None:
    verifier = ForcedVerifier()
    with (
        metadata_service() as (trap, visitors),
        serving(create_app(SingleFleet(verifier, 256), RouterSettings())) as url,
    ):
        for address in (
            "http://169.254.169.254/latest/meta-data/",
            trap,
            trap + "/redirect",
            "file:///etc/passwd",
            "data:image/png;base64,AAAA",
        ):
            for part in (
                {"type": "image_url", "image_url": {"url": address}},
                {"type": "input_audio", "input_audio": {"data": address, "format": "wav"}},
                {"type": "file", "file": {"file_data": address}},
                {"type": "text", "text": "x", "image_url": {"url": address}},
            ):
                body = {"messages": [{"role": "user", "content": [part]}]}
                response = httpx.post(url + "/v1/chat/completions", json=body, timeout=60)
                assert response.status_code == 400
                assert response.json()["error"]["param"].startswith("messages[0].content[0]")
            for name in (address, "../../etc/passwd", "/etc/passwd"):
                for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})):
                    response = httpx.post(url + path, json={**body, "model": name}, timeout=60)
                    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert verifier.requests == []
        assert visitors == []
        httpx.get(trap, timeout=60)
        assert len(visitors) == 1, "the trap does catch"
