"""B39: what one key has sent helps no other, over HTTP against a real engine. And 401 for everything without a key.

First-token times are not compared: they are noise here. What they would tell is the work before the first token, and
that is counted: tokens that the target had to read.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from eagle2.router.api import create_app
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet
from eagle2.router.tenants import KeyFile, key_line
from eagle2.telemetry import metrics
from eagle2.verifier.service import VerifierService
from fakes.engines import EngineKit, draft_head
from fakes.server import serving
from fakes.verifier import ForcedVerifier, describe
from integration.conftest import Stack

KEYS = {"sk-acme-1": "acme", "sk-acme-2": "acme", "sk-org-1": "org_1", "sk-org-12345": "org_12345", "sk-2345": "2345"}


def keys_in(folder: Path, *more: str) -> KeyFile:
    path = folder / "keys"
    path.write_text("\n".join([*(key_line(tenant, key) for key, tenant in KEYS.items()), *more]))
    return KeyFile(path)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    handler = draft_head()
    kit = EngineKit(handler)
    service = VerifierService(kit.engine, describe())
    keys = keys_in(tmp_path_factory.mktemp("keys"))
    with serving(create_app(SingleFleet(service, 256), RouterSettings(), keys=keys)) as url:
        yield Stack(url, kit, handler)
    service.close()


class Reading:
    """The answer to one prompt: how much of it was found, and how much the target read."""

    def __init__(self, stack: Stack, key: str, prompt: str, headers: dict[str, str] | None = None, **fields: Any):
        before = stack.kit.stats.get(metrics.PREFILL_TOKENS)
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "return_token_ids": True, **fields}
        headers = {"Authorization": f"Bearer {key}", **(headers or {})}
        response = httpx.post(stack.url + "/v1/completions", json=body, headers=headers, timeout=120)
        assert response.status_code == 200, response.text
        self.read = stack.kit.stats.get(metrics.PREFILL_TOKENS) - before
        self.cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.tokens = response.json()["usage"]["prompt_tokens"]
        self.ids = response.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"session_id": "s1"},
        {"user": "s1"},
        {"prompt_cache_key": "s1"},
        {"headers": {"X-Session-Id": "s1"}},
        {"session_id": "s1", "user": "s1", "prompt_cache_key": "s1", "metadata": {"session": "s1"}},
    ],
)
def test_b39_another_tenant_finds_nothing(closed: Stack, named: dict[str, Any]) -> None:
    prompt = f"{len(str(named)):03d} seven lighthouses of the northern coast " * 8
    cold = Reading(closed, "sk-acme-1", prompt, session_id="s1")
    own = Reading(closed, "sk-acme-1", prompt, session_id="s1")
    other_key = Reading(closed, "sk-acme-2", prompt)
    for warm in (own, other_key):
        assert warm.cached == warm.tokens - 1, "the tenant's own is found, by either of its keys"
        assert warm.read <= 2
    for key in ("sk-org-1", "sk-org-12345", "sk-2345"):
        foreign = Reading(closed, key, prompt, **named)
        # All prompts share their first token, and a tenant its own of earlier cases.
        assert foreign.cached <= 4
        assert foreign.read >= foreign.tokens - 4
        assert foreign.ids == cold.ids


def test_b39_a_salt_is_no_field(closed: Stack) -> None:
    body = {"prompt": "Hi", "cache_salt": "acme"}
    response = httpx.post(closed.url + "/v1/completions", json=body, headers={"Authorization": "Bearer sk-org-1"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/", "/docs", "/x"]
CREDENTIALS = [None, "Bearer", "Bearer sk-wrong", "Basic sk-acme-1", "sk-acme-1", "Bearer sk-acme-1 x", b"Bearer \xff"]


@pytest.mark.parametrize("path", [*PATHS, "/health/", "/ready/", "/health/../metrics", "/HEALTH"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS", "PATCH"])
def test_without_a_key_everything_looks_alike(closed: Stack, path: str, method: str) -> None:
    with httpx.Client(base_url=closed.url) as client:
        for credential in CREDENTIALS:
            headers = {} if credential is None else {"Authorization": credential}
            response = client.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"].startswith("Bearer")
            assert response.headers["x-request-id"]
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["code"] in ("missing_api_key", "invalid_api_key")
            assert "sk-" not in response.text


def test_probes_need_no_key_and_everything_else_is_served_with_one(closed: Stack) -> None:
    with httpx.Client(base_url=closed.url) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200
        headers = {"Authorization": "bearer sk-acme-1"}
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/x", headers=headers).status_code == 404
        assert client.delete("/v1/models", headers=headers).status_code == 405
        text = client.get("/metrics", headers=headers).text
        assert 'eagle2_requests_total{endpoint="/v1/completions",status="401"}' in text


def test_the_401_does_not_wait_for_the_body(closed: Stack) -> None:
    address = urlsplit(closed.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as sock:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 27000000\r\n\r\n"
        sock.sendall(head.encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_the_official_client_understands(tmp_path: Path) -> None:
    limited = f"{key_line('slow', 'sk-slow')} requests_per_minute=1 tokens_per_minute=100"
    app = create_app(SingleFleet(ForcedVerifier(), 256), RouterSettings(), keys=keys_in(tmp_path, limited))
    with serving(app) as url:
        wrong = openai.OpenAI(base_url=url + "/v1", api_key="sk-wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError) as refused:
            wrong.models.list()
        assert refused.value.code == "invalid_api_key"
        slow = openai.OpenAI(base_url=url + "/v1", api_key="sk-slow", max_retries=0)
        first = slow.completions.with_raw_response.create(model="tiny/bytes", prompt="Hi")
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert first.headers["x-ratelimit-remaining-tokens"] == "97"
        with pytest.raises(openai.RateLimitError) as limit:
            slow.completions.create(model="tiny/bytes", prompt="Hi")
        assert limit.value.code == "rate_limit_exceeded"
        assert 1 <= int(limit.value.response.headers["retry-after"]) <= 60
        assert limit.value.response.headers["x-ratelimit-limit-requests"] == "1"
        assert openai.OpenAI(base_url=url + "/v1", api_key="sk-acme-1").models.list().data, "others are not held up"


def test_answers_are_charged_also_when_their_client_leaves(tmp_path: Path) -> None:
    limited = f"{key_line('slow', 'sk-slow')} tokens_per_minute=1000"
    verifier = ForcedVerifier(["x" * 400], endless=True, pause_s=0.01)
    app = create_app(SingleFleet(verifier, 256), RouterSettings(), keys=keys_in(tmp_path, limited))
    with serving(app) as url, httpx.Client(base_url=url, headers={"Authorization": "Bearer sk-slow"}) as client:
        body = {"prompt": "Hi", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["x-ratelimit-remaining-tokens"] == "997"
            for count, _ in enumerate(response.iter_lines()):
                if count > 8:
                    break
        limit = time.monotonic() + 20
        while verifier.running:
            assert time.monotonic() < limit
            time.sleep(0.01)
        second = client.post("/v1/completions", json={"prompt": "Hi"})
        assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
