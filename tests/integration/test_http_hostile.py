"""B38: hostile bodies, over HTTP against a real engine. Each is refused by name; the server lives and answers on.

How long /health takes meanwhile is a matter of the machine; here it must answer while the bodies are under way, and the
memory that they take is bounded. That only so much is parsed and tokenised is tested in unit/test_prompt_length.py.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from eagle2.router.api import create_app
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet
from fakes.server import serving
from fakes.verifier import ForcedVerifier
from integration.conftest import Stack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
MB = 1024 * 1024


def control(stack: Stack) -> list[int]:
    body = {"prompt": "the old sailor ", "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    response = httpx.post(stack.url + COMPLETIONS, json=body, timeout=120)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


FIELDS: list[tuple[str, str, Any]] = [
    (COMPLETIONS, "n", 5_000_000),
    (COMPLETIONS, "best_of", 10**9),
    (CHAT, "top_logprobs", 10**9),
    (COMPLETIONS, "logprobs", 10**9),
    *((path, "temperature", value) for path in (CHAT, COMPLETIONS) for value in (-1, 1e9, "0.7", 999_999)),
    *((COMPLETIONS, "top_p", value) for value in (-1, 0, 1.5)),
    *((COMPLETIONS, name, value) for name in ("presence_penalty", "frequency_penalty") for value in (1e9, -1e9)),
    (COMPLETIONS, "repetition_penalty", 1e9),
    (COMPLETIONS, "prompt", [-1]),
    (COMPLETIONS, "prompt", [10**9]),
    (COMPLETIONS, "prompt", [1, 2, 10**30]),
    (COMPLETIONS, "stop", ["x"] * 10_000),
    (COMPLETIONS, "stop", [""]),
    *((path, "max_tokens", value) for path in (CHAT, COMPLETIONS) for value in (0, -5, 2**63)),
    (CHAT, "messages", []),
    (CHAT, "messages", [{"role": "user", "content": None}]),
    (CHAT, "messages", [{"role": "user", "content": "\ud800"}]),
    (COMPLETIONS, "prompt", "\ud800"),
]


def test_b38_fields_out_of_range_are_named(stack: Stack) -> None:
    """(b) to (f), (h) and (i)."""
    before = control(stack)
    for path, field, value in FIELDS:
        body = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
        content = json.dumps({**body, field: value})  # escapes a lone surrogate
        response = httpx.post(stack.url + path, content=content, headers=JSON, timeout=60)
        assert response.status_code == 400, (field, value, response.text)
        assert response.json()["error"]["param"].startswith(field)
    assert control(stack) == before


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt":"Hi","temperature":NaN}',
        '{"prompt":"Hi","temperature":Infinity}',
        '{"prompt":"Hi","temperature":1e999}',
        '{"prompt":"Hi","seed":' + "9" * 100_000 + "}",
        "[" * 100_000 + "]" * 100_000,
        '{"prompt":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a":' * 100_000 + "1" + "}" * 100_000,
    ],
    ids=["NaN", "Infinity", "1e999", "digits", "nested lists", "nested prompt", "nested objects"],
)
def test_b38_json_that_is_none_or_too_deep(stack: Stack, body: str) -> None:
    """(d) and (g)."""
    before = control(stack)
    response = httpx.post(stack.url + COMPLETIONS, content=body, headers=JSON, timeout=60)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert control(stack) == before


def resident() -> int:
    """Bytes of this process, which is client and server."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def chunks(size: int) -> AsyncIterator[bytes]:
    yield b'{"prompt":"'
    for _ in range(size // 65536):
        yield b"a" * 65536


@pytest.mark.parametrize("kind", ["announced", "chunked", "gzip bomb"])
async def test_b38_bodies_beyond_the_bound_are_not_read_in(stack: Stack, kind: str) -> None:
    """(a): 27 MB, with and without its length, and 200 MB that are small on the wire."""
    before = control(stack)
    headers, content, status = dict(JSON), chunks(27 * MB), 413
    if kind == "announced":
        headers["Content-Length"] = str(11 + 27 * MB)
    if kind == "gzip bomb":
        status = 415
        headers["Content-Encoding"] = "gzip"

        async def bomb() -> AsyncIterator[bytes]:
            yield gzip.compress(bytes(20 * MB)) * 10

        content = bomb()
    began = resident()
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        response = await client.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == status
        assert (await client.get("/health")).status_code == 200
    assert resident() - began < 100 * MB
    assert control(stack) == before


def bodies_near_the_bound() -> dict[str, tuple[str, bytes]]:
    size = 4 * MB - 4096
    return {
        "text": (COMPLETIONS, json.dumps({"prompt": "hello world, " * (size // 13)}).encode()),
        "spaces": (COMPLETIONS, json.dumps({"prompt": " " * size}).encode()),
        "chat": (CHAT, json.dumps({"messages": [{"role": "user", "content": "a" * size}]}).encode()),
        "messages": (CHAT, json.dumps({"messages": [{"role": "user", "content": "a" * 900}] * 4000}).encode()),
        "ids": (COMPLETIONS, b'{"prompt":[' + b",".join([b"1"] * (size // 2)) + b"]}"),
        "lists": (COMPLETIONS, b'{"prompt":"x","foo":[' + b",".join([b"[]"] * (size // 3)) + b"]}"),
    }


@pytest.mark.parametrize("kind", bodies_near_the_bound())
async def test_b38_bodies_within_the_bound_hold_up_nobody(stack: Stack, kind: str) -> None:
    """10 at once: /health answers meanwhile, and the memory that they take is theirs and little more."""
    path, body = bodies_near_the_bound()[kind]
    before = await asyncio.to_thread(control, stack)
    began, peak, probes = resident(), 0, 0
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, limits=limits) as client:
        flood = asyncio.gather(*(client.post(path, content=body, headers=JSON) for _ in range(10)))
        async with httpx.AsyncClient(base_url=stack.url, timeout=30) as prober:
            while not flood.done():
                assert (await prober.get("/health")).status_code == 200
                probes += 1
                peak = max(peak, resident())
                await asyncio.sleep(0.005)
        answers = await flood
    assert probes > 1
    for response in answers:
        assert response.status_code == 400
        assert response.json()["error"]["code"] in ("context_length_exceeded", "too_many_values")
    # Each body is held once by this client's connection and once by the server.
    assert peak - began < 100 * MB + 2 * 10 * len(body)
    assert await asyncio.to_thread(control, stack) == before


def test_b38_a_body_that_trickles_is_cut() -> None:
    """(j)"""
    settings = RouterSettings(body_timeout_s=0.5)
    with serving(create_app(SingleFleet(ForcedVerifier(), 256), settings)) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as sock:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
            sock.sendall(head.encode())
            sock.settimeout(0.1)
            answer, limit = b"", time.monotonic() + 30
            while not answer:
                assert time.monotonic() < limit
                sock.sendall(b"{")
                try:
                    answer = sock.recv(4096)
                except TimeoutError:
                    continue
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert httpx.post(url + COMPLETIONS, json={"prompt": "Hi"}, timeout=60).status_code == 200
