"""Bodies on the wire, clients that leave, and clients that do not read: against a real server."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from eagle2.errors import RequestError
from eagle2.router.api import create_app
from eagle2.router.body import read_body
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet
from eagle2.router.stream import ClientGone, CommitStream, while_connected
from eagle2.text.tokenizer import Tokenizer
from fakes.server import serving
from fakes.verifier import ForcedVerifier

PROMPT: dict[str, Any] = {"prompt": "Hi"}
JSON = {"Content-Type": "application/json"}


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@contextmanager
def connection(url: str, body: bytes, headers: str = "", length: int | None = None) -> Iterator[socket.socket]:
    """A socket on which one completion request has been written."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as sock:
        size = f"Content-Length: {len(body) if length is None else length}\r\n" if "chunked" not in headers else ""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{size}{headers}\r\n"
        sock.sendall(head.encode() + body)
        yield sock


def answer(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    raw = b""
    while b"\r\n\r\n" not in raw or not raw.endswith(b"}"):
        part = sock.recv(65536)
        if not part:
            break
        raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(stream: bool) -> None:
    verifier = ForcedVerifier(["x"], endless=True, pause_s=0.01)
    with serving(create_app(SingleFleet(verifier, 256), RouterSettings())) as url:
        body = json.dumps({**PROMPT, "stream": stream}).encode()
        for count in range(1, 6):
            seen = verifier.commits
            with connection(url, body):
                assert eventually(lambda seen=seen: verifier.commits > seen + 3)  # type: ignore[misc]
                assert verifier.running == 1
            assert eventually(lambda: verifier.running == 0)
            assert verifier.aborted == count
        seen = verifier.commits
        time.sleep(0.1)
        assert verifier.commits == seen
        text = httpx.get(url + "/metrics").text
        assert 'eagle2_requests_aborted_total{endpoint="/v1/completions",reason="disconnect"} 5.0' in text
        assert "eagle2_router_requests_running 0.0" in text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token(stream: bool) -> None:
    verifier = ForcedVerifier(["x"], pause_s=30)
    with serving(create_app(SingleFleet(verifier, 256), RouterSettings())) as url:
        with connection(url, json.dumps({**PROMPT, "stream": stream}).encode()):
            assert eventually(lambda: verifier.running == 1)
        assert eventually(lambda: verifier.running == 0, 2)
        assert (verifier.commits, verifier.aborted) == (0, 1)


def test_one_that_leaves_disturbs_no_other() -> None:
    verifier = ForcedVerifier(["ab", "cd", "ef"], pause_s=0.05)
    with serving(create_app(SingleFleet(verifier, 256), RouterSettings())) as url, httpx.Client(base_url=url) as client:
        body = json.dumps({**PROMPT, "stream": True}).encode()
        for _ in range(4):
            with connection(url, body):
                time.sleep(0.06)
            assert client.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"] == "abcdef"
        assert eventually(lambda: verifier.running == 0)
        assert (verifier.completed, verifier.aborted) == (4, 4)


def test_a_reader_that_stops_is_cut() -> None:
    verifier = ForcedVerifier(["x" * 100_000], endless=True)
    with serving(create_app(SingleFleet(verifier, 256), RouterSettings(slow_reader_timeout_s=0.4))) as url:
        with connection(url, json.dumps({**PROMPT, "stream": True}).encode()) as sock:
            assert eventually(lambda: verifier.running == 1)
            assert eventually(lambda: verifier.running == 0)
            first = verifier.commits
            time.sleep(0.1)
            assert verifier.commits == first
            total = b""
            while part := sock.recv(1 << 20):  # what was buffered can be read, then the connection ends
                total += part
            assert total.count(b"data: ") <= first
            assert b"[DONE]" not in total
            assert not total.endswith(b"0\r\n\r\n")
        text = httpx.get(url + "/metrics").text
        assert 'eagle2_requests_aborted_total{endpoint="/v1/completions",reason="slow_reader"} 1.0' in text


@pytest.fixture(scope="module")
def bounded() -> Iterator[str]:
    settings = RouterSettings(max_body_bytes=100_000, body_timeout_s=1.0)
    with serving(create_app(SingleFleet(ForcedVerifier(), 256), settings)) as url:
        yield url


@pytest.mark.parametrize("size", [100_001, 27_000_000])
@pytest.mark.parametrize("chunked", [True, False])
def test_bodies_too_large(bounded: str, size: int, chunked: bool) -> None:
    body = json.dumps({"prompt": "a" * size}).encode()
    content: Any = iter([body[i : i + 65536] for i in range(0, len(body), 65536)]) if chunked else body
    response = httpx.post(bounded + "/v1/completions", content=content, headers=JSON, timeout=30)
    assert response.status_code == 413
    error = response.json()["error"]
    assert error["code"] == "body_too_large"
    assert "100000" in error["message"]
    assert httpx.post(bounded + "/v1/completions", json=PROMPT).status_code == 200


async def test_the_rest_of_a_large_body_is_taken_and_thrown_away() -> None:
    """A sender that is still writing would else see a reset connection instead of the answer."""
    parts = [{"type": "http.request", "body": b"x" * 60, "more_body": left > 0} for left in reversed(range(5))]

    async def receive() -> Any:
        return parts.pop(0)

    for headers in ({}, {"content-length": "300"}):
        sent, parts = parts, list(parts)
        with pytest.raises(RequestError) as refused:
            await read_body(receive, headers, RouterSettings(max_body_bytes=100))
        assert refused.value.status == 413
        assert not parts
        parts = sent


def test_an_enormous_announcement_is_refused_unread(bounded: str) -> None:
    with connection(bounded, b"{", length=10**12) as sock:
        assert answer(sock)[0] == 413


def test_a_body_as_large_as_allowed(bounded: str) -> None:
    body = json.dumps(PROMPT).encode()
    body += b" " * (100_000 - len(body))
    assert httpx.post(bounded + "/v1/completions", content=body, headers=JSON).status_code == 200
    assert httpx.post(bounded + "/v1/completions", content=body + b" ", headers=JSON).status_code == 413


def test_compressed_and_foreign_bodies(bounded: str) -> None:
    url = bounded + "/v1/completions"
    bomb = gzip.compress(b" " * 10_000_000)
    packed = httpx.post(url, content=bomb, headers={**JSON, "Content-Encoding": "gzip"})
    assert (packed.status_code, packed.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    form = httpx.post(url, data={"prompt": "Hi"})
    assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
    charset = {"Content-Type": "application/json; charset=utf-8"}
    assert httpx.post(url, content=json.dumps(PROMPT).encode(), headers=charset).status_code == 200


def test_a_body_that_trickles_is_cut(bounded: str) -> None:
    with connection(bounded, b'{"pro', length=50) as sock:
        status, body = answer(sock)
    assert (status, body["error"]["code"]) == (408, "body_timeout")


def test_a_client_that_leaves_within_its_body(bounded: str) -> None:
    with connection(bounded, b'{"pro', length=50):
        time.sleep(0.05)
    assert httpx.get(bounded + "/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 50_000,
        b'{"prompt":' * 9_000,
        b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"messages":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
        b'{"max_tokens":' + b"9" * 5_000 + b"}",
        b'{"prompt":"\xff\xfe"}',
        b"\xef\xbb\xbf{}",
        b"null",
        b"[]",
        b"3",
        b"",
        b'{"prompt":"Hi"} trailing',
        b"{" + b",".join(b'"f%d":1' % i for i in range(9_000)) + b"}",
        b'{"prompt":"Hi","\\ud800":1}',
    ],
)
def test_hostile_json_is_a_400(bounded: str, body: bytes) -> None:
    response = httpx.post(bounded + "/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 1000


def test_a_long_prompt_does_not_stop_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenising waits here until /health has been answered, which it never is where that runs on the loop."""
    answered, began = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def slow_encode(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > 1000:
            began.set()
            assert answered.wait(20)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow_encode)
    long = json.dumps({"prompt": "hello world " * 20_000}).encode()
    with (
        serving(create_app(SingleFleet(ForcedVerifier(), 256), RouterSettings())) as url,
        connection(url, long) as sock,
    ):
        assert began.wait(20)
        assert httpx.get(url + "/health", timeout=10).status_code == 200
        assert httpx.post(url + "/v1/completions", json=PROMPT, timeout=10).status_code == 200
        answered.set()
        status, body = answer(sock)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "the most are 8192" in body["error"]["message"]


def test_nothing_private_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {"Authorization": "Bearer sk-CANARY-123", "X-Session-Id": "CANARY-SESS"}
    asked = {"messages": [{"role": "user", "content": "CANARY-PROMPT-9"}], "session_id": "CANARY-SESS"}
    bad = {**asked, "messages": [{"role": "user", "content": {"CANARY": "CANARY-PROMPT-9"}}]}
    failing = ForcedVerifier(before=RuntimeError("CANARY-PROMPT-9"))
    endless = ForcedVerifier(endless=True, pause_s=0.01)
    seen = ""
    for verifier, body in ((ForcedVerifier(), asked), (ForcedVerifier(), bad), (failing, asked), (endless, asked)):
        with serving(create_app(SingleFleet(verifier, 256), RouterSettings())) as url:
            path = "/v1/chat/completions"
            if verifier is endless:
                with httpx.stream("POST", url + path, json={**body, "stream": True}, headers=headers) as response:
                    next(response.iter_lines())
                assert eventually(lambda: endless.running == 0)
            else:
                response = httpx.post(url + path, json=body, headers=headers)
                assert response.status_code == {id(failing): 500}.get(id(verifier), 200 if body is asked else 400)
                seen += response.text + str(response.headers)
            seen += httpx.get(url + "/metrics").text
    logged = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith(("httpcore", "httpx")))
    assert "failed: RuntimeError" in logged
    assert "CANARY" not in logged + seen


async def test_work_ends_before_its_cancellation_is_reported() -> None:
    steps: list[str] = []

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            steps.append("cleaned")

    with pytest.raises(ClientGone):
        await while_connected(receive, work)
    assert steps == ["cleaned"]


async def test_cancelling_the_server_side_ends_the_work() -> None:
    verifier = ForcedVerifier(endless=True, pause_s=0.001)
    app = create_app(SingleFleet(verifier, 256), RouterSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        task = asyncio.create_task(client.post("/v1/completions", json=PROMPT))
        while verifier.commits < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (verifier.running, verifier.aborted) == (0, 1)


async def test_a_verifier_that_hangs_when_closed_is_left() -> None:
    class Hanging:
        closed = 0

        def __aiter__(self) -> Hanging:
            return self

        async def __anext__(self) -> Any:
            raise AssertionError("nobody reads")

        async def aclose(self) -> None:
            Hanging.closed += 1
            await asyncio.sleep(60)

    await CommitStream(Hanging(), close_timeout_s=0.01).close()
    assert Hanging.closed == 1
