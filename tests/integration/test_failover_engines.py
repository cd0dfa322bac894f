"""Answers that move between real engines: the second one goes on with the tokens and text of an undisturbed run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from eagle2.errors import UnavailableError
from eagle2.protocol import Commit, GenerationRequest, ModelDescription, Replica
from eagle2.telemetry import metrics
from eagle2.verifier.service import VerifierService
from fakes.engines import EngineKit, draft_head, request
from fakes.routing import FakeRouter
from fakes.stores import DownStore
from fakes.verifier import describe


class Engines:
    """A fleet of engines in this process. An attempt breaks behind ``cut`` commits, but the last one."""

    def __init__(self, services: list[VerifierService]) -> None:
        self._services = {f"r{number}": service for number, service in enumerate(services)}
        self.cut: int | None = None

    def replicas(self) -> tuple[Replica, ...]:
        return tuple(Replica(uid, uid, 8) for uid in self._services)

    async def generate(self, replica: Replica, request: GenerationRequest) -> AsyncIterator[Commit]:
        count = 0
        async for commit in self._services[replica.uid].generate(request):
            if count == self.cut and request.attempt == 0:
                raise UnavailableError("The verifier of this request is gone.")
            yield commit
            count += 1

    async def describe(self) -> ModelDescription:
        return describe()

    async def stats(self) -> dict[str, float]:
        return {}


@pytest.fixture(scope="module")
def services() -> Iterator[list[VerifierService]]:
    with ExitStack() as stack:
        started = []
        for _ in range(2):
            service = VerifierService(EngineKit(draft_head()).engine, describe())
            stack.callback(service.close)
            started.append(service)
        yield started


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "our neighbour buys the red mirror "},
    "seeded": {"prompt": "the old sailor ", "temperature": 1.0, "seed": 5},
    "penalties": {"prompt": "1 2 3 4 5 6 7 8 ", "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "without drafts": {"prompt": "the queen follows the silver ", "speculation": False},
    "bytes": {"prompt": "der \u00fcberm\u00fctige \u6f22\u5b57 \U0001f600 ", "temperature": 1.6, "seed": 11},
    "held back": {"prompt": "our neighbour buys the red mirror ", "stop": ("e qq", "the zz", " q", "x")},
}


@pytest.mark.parametrize("case", CASES)
async def test_cut_behind_every_commit(services: list[VerifierService], case: str) -> None:
    fields = dict(CASES[case])
    asked = request(fields.pop("prompt"), max_tokens=24, **fields)
    fleet = Engines(services)
    whole = await FakeRouter(fleet, DownStore(), progress_timeout_s=60).answer(asked)
    assert whole.usage is not None
    assert whole.commits > 2
    for cut in range(whole.commits - 1):
        fleet.cut = cut
        router = FakeRouter(fleet, DownStore(), progress_timeout_s=60)
        received = await router.answer(replace(asked, request_id=f"{asked.request_id}.{cut}"))
        assert received.whole == whole.whole, cut
        assert received.usage is not None
        assert received.usage.prompt_tokens == whole.usage.prompt_tokens
        assert received.usage.completion_tokens == len(received.ids)
        # As in one engine: each cycle commits its accepted tokens and one more, and the prompt gives the first token.
        kept = received.usage.accepted_prediction_tokens + received.usage.cycles + 1
        assert len(received.ids) - 1 <= kept <= len(received.ids) + 1
        assert router.count(metrics.FAILOVERS, reason="crash") == 1
