"""A verifier leases a free proposer of its node; one that is taken, gone or of another model is passed over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.serve.handle import DeploymentHandle

from eagle2.proposer.service import ProposerService
from eagle2.transport.messages import DraftReply, DraftStep
from eagle2.verifier.pairing import NodePairing


class _Idle:
    def handle(self, step: DraftStep) -> DraftReply:
        raise AssertionError("no step is sent here")

    def reset(self) -> None:
        pass


class _Handle:
    """Offers replicas in order, as Serve's node-strict router does; waits where none is left."""

    def __init__(self, replicas: dict[str, dict[str, str]]) -> None:
        self.replicas = replicas

    @asynccontextmanager
    async def choose_replica(self, tried: frozenset[str], *, _reserve: bool) -> AsyncIterator[SimpleNamespace]:
        assert not _reserve, "reserving would call into the proposer"
        while not (left := [name for name in self.replicas if name not in tried]):
            await asyncio.sleep(0.01)
        yield SimpleNamespace(replica_id=left[0], replica_metadata=self.replicas[left[0]])


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def proposers(tmp_path: Path) -> Iterator[list[ProposerService]]:
    models = ("llama", "llama", "qwen")
    services = [
        ProposerService(_Idle(), socket_dir=tmp_path / "p", incarnation=i, fingerprint=model)
        for i, model in enumerate(models, start=1)
    ]
    for service in services:
        service.start()
    yield services
    for service in services:
        service.close()


def _pairing(loop: asyncio.AbstractEventLoop, handle: _Handle, incarnation: int, wait_s: float = 2.0) -> NodePairing:
    proposers = cast("DeploymentHandle[Any]", handle)
    return NodePairing(proposers, loop, incarnation=incarnation, fingerprint="llama", wait_s=wait_s)


def test_the_second_verifier_gets_the_second_proposer(
    loop: asyncio.AbstractEventLoop, proposers: list[ProposerService]
) -> None:
    handle = _Handle({"a": proposers[0].metadata(), "b": proposers[1].metadata()})
    first, second = (_pairing(loop, handle, incarnation).connect() for incarnation in (11, 12))
    assert first is not None
    assert second is not None
    assert (first.incarnation, second.incarnation) == (1, 2)
    assert _pairing(loop, handle, 13, wait_s=0.2).connect() is None, "both are leased"
    first.close()
    second.close()


def test_a_dead_proposer_and_one_of_another_model_are_passed_over(
    loop: asyncio.AbstractEventLoop, proposers: list[ProposerService], tmp_path: Path
) -> None:
    gone = {"socket": str(tmp_path / "gone.sock"), "incarnation": "9"}
    handle = _Handle({"gone": gone, "qwen": proposers[2].metadata(), "good": proposers[1].metadata()})
    link = _pairing(loop, handle, 11).connect()
    assert link is not None
    assert link.incarnation == 2
    link.close()


def test_a_proposer_that_appears_during_the_search_is_taken(
    loop: asyncio.AbstractEventLoop, proposers: list[ProposerService]
) -> None:
    handle = _Handle({})
    loop.call_later(0.1, handle.replicas.update, {"late": proposers[0].metadata()})
    link = _pairing(loop, handle, 11, wait_s=10.0).connect()
    assert link is not None
    link.close()


def test_a_search_without_a_candidate_ends_and_leaves_nothing_on_the_loop(loop: asyncio.AbstractEventLoop) -> None:
    assert _pairing(loop, _Handle({}), 11, wait_s=0.1).connect() is None

    async def tasks() -> int:
        await asyncio.sleep(0.05)
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run_coroutine_threadsafe(tasks(), loop).result(5) == 0
