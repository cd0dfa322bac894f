"""Timeouts and classes through HTTP, over a real engine with one place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from eagle2.router.api import create_app
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet
from eagle2.telemetry import metrics
from eagle2.verifier.service import VerifierService
from fakes.engines import EngineKit, draft_head
from fakes.server import serving
from fakes.verifier import describe

LONG = {"prompt": "the old sailor ", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 4}


@pytest.fixture
def stack() -> Iterator[tuple[str, EngineKit]]:
    kit = EngineKit(draft_head(), max_sequences=1)
    service = VerifierService(kit.engine, describe())
    with serving(create_app(SingleFleet(service, 256), RouterSettings())) as url:
        yield url, kit
    service.close()


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def wait_until_idle(kit: EngineKit) -> None:
    limit = time.monotonic() + 30
    while kit.engine.scheduler.running or kit.engine.scheduler.waiting or kit.target.pool.num_used:
        assert time.monotonic() < limit, "places and slots are free after 30 s"
        time.sleep(0.01)


def test_a_timeout_ends_the_answer_and_frees_its_place(stack: tuple[str, EngineKit]) -> None:
    url, kit = stack
    late = post(url, {**LONG, "timeout": 0.02})
    assert late.status_code == 504
    error = late.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert error["message"].startswith("The deadline passed after ")
    wait_until_idle(kit)
    assert post(url, {**SHORT, "timeout": 60}).status_code == 200


def test_a_timeout_holds_for_those_that_wait(stack: tuple[str, EngineKit]) -> None:
    url, kit = stack
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(post, url, LONG)
        late = [pool.submit(post, url, {**SHORT, "timeout": 0.001}) for _ in range(3)]
        assert [answer.result().status_code for answer in late] == [504] * 3
        assert running.result().status_code == 200, "the one that runs is not touched"
    wait_until_idle(kit)


def test_the_official_client_has_it_in_extra_body(stack: tuple[str, EngineKit]) -> None:
    url, _ = stack
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(
            model="tiny/bytes",
            prompt="the old sailor ",
            max_tokens=400,
            extra_body={"timeout": 0.02, "ignore_eos": True},
        )
    assert raised.value.status_code == 504


def test_a_batch_request_makes_way_and_says_the_same(stack: tuple[str, EngineKit]) -> None:
    url, kit = stack
    alone = post(url, LONG).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, url, {**LONG, "priority": "batch"})
        limit = time.monotonic() + 30
        while not kit.engine.scheduler.running:
            assert time.monotonic() < limit, "the batch request runs within 30 s"
            time.sleep(0.001)
        assert post(url, SHORT).status_code == 200
        assert kit.stats.get(metrics.NUM_PREEMPTIONS) >= 1
        assert slow.result().json()["choices"][0]["text"] == alone
    wait_until_idle(kit)
