"""The proposer as a service: where it is found, and when it calls itself broken."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle2.errors import ConfigError, LinkDownError, UnavailableError
from eagle2.proposer.service import ProposerService
from eagle2.transport.messages import DraftEntry, DraftStep
from eagle2.transport.node import NodeLink
from fakes.drafts import OracleHandler

INCARNATION = 0xFEED


class Moody(OracleHandler):
    """Fails on demand, while it drafts or while it is reset."""

    def __init__(self, incarnation: int = INCARNATION) -> None:
        super().__init__(self._continue, incarnation=incarnation)
        self.broken = False
        self.broken_reset = False

    def reset(self) -> None:
        if self.broken_reset:
            raise OSError("no memory for the cache")
        super().reset()

    def _continue(self, context: list[int]) -> list[int]:
        if self.broken:
            raise ZeroDivisionError("a fault of the head")
        return [context[-1] + 1, context[-1] + 2]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="e2") as name:
        yield Path(name) / "pairs"


@pytest.fixture
def handler() -> Moody:
    return Moody()


@pytest.fixture
def service(folder: Path, handler: Moody) -> Iterator[ProposerService]:
    service = ProposerService(handler, socket_dir=folder, incarnation=INCARNATION, fingerprint="llama")
    service.start()
    yield service
    service.close()


def ask(service: ProposerService, *, times: int = 1) -> list[int]:
    """The tokens drafted by ``times`` steps of one verifier; the last step's."""
    link = NodeLink.connect(service.metadata()["socket"], verifier_incarnation=2, fingerprint="llama", timeout_s=10)
    try:
        tokens: list[int] = []
        for number in range(times):
            entry = DraftEntry(1, number, 0, torch.zeros(2, 4), torch.tensor([5, 6]))
            link.send(DraftStep(2, number, 4, 2, 8, (entry,)))
            reply = link.receive(10.0)
            assert reply is not None
            tokens = reply.trees[0].tokens.tolist()
        return tokens
    finally:
        link.close()


def test_metadata_leads_to_the_proposer(service: ProposerService, folder: Path) -> None:
    assert service.metadata() == {"socket": str(folder / "feed.sock"), "incarnation": str(INCARNATION)}
    assert ask(service) == [7, 8]
    service.check_health()


def test_the_folder_is_private(service: ProposerService, folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_may_write_to_is_refused(folder: Path, handler: Moody) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="mode 777"):
        ProposerService(handler, socket_dir=folder, incarnation=1, fingerprint="llama").start()


def test_two_proposers_share_a_folder(service: ProposerService, folder: Path) -> None:
    other = ProposerService(Moody(incarnation=4), socket_dir=folder, incarnation=4, fingerprint="llama")
    other.start()
    assert ask(other) == ask(service) == [7, 8]
    other.close()
    service.check_health()


def test_stats_count_what_was_done(service: ProposerService) -> None:
    ask(service, times=3)
    stats = service.stats()
    assert {name: stats[name] for name in ("steps", "entries", "rows", "drafted_tokens")} == {
        "steps": 3,
        "entries": 3,
        "rows": 6,
        "drafted_tokens": 6,
    }
    assert (stats["leases"], stats["handler_errors"]) == (1, 0)


def test_leased_shows_while_a_verifier_is_there(service: ProposerService) -> None:
    assert service.stats()["leased"] == 0
    link = NodeLink.connect(service.metadata()["socket"], verifier_incarnation=2, fingerprint="llama", timeout_s=10)
    assert service.stats()["leased"] == 1
    link.close()


def test_a_failed_step_is_logged_and_the_service_goes_on(
    service: ProposerService, handler: Moody, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        handler.broken = True
        for _ in range(2):
            with pytest.raises(LinkDownError):
                ask(service)
        service.check_health()
        handler.broken = False
        assert ask(service) == [7, 8]  # and the count starts anew
    assert service.stats()["handler_errors"] == 4
    assert "a fault of the head" in caplog.text
    assert "Traceback" in caplog.text


def test_three_failures_in_a_row_are_a_broken_handler(service: ProposerService, handler: Moody) -> None:
    handler.broken = True
    for _ in range(3):
        service.check_health()
        with pytest.raises(LinkDownError):
            ask(service)
    with pytest.raises(UnavailableError, match=r"failed 3 times in a row, last with ZeroDivisionError\('a fault"):
        service.check_health()


def test_a_reset_that_fails_counts_too(service: ProposerService, handler: Moody) -> None:
    handler.broken_reset = True
    for _ in range(3):
        with pytest.raises(LinkDownError, match="did not answer the greeting"):
            ask(service)
    with pytest.raises(UnavailableError, match="no memory for the cache"):
        service.check_health()


def test_replies_signed_by_another_incarnation_are_a_fault(folder: Path) -> None:
    service = ProposerService(
        Moody(incarnation=8), socket_dir=folder, incarnation=9, fingerprint="llama", max_failures=1
    )
    service.start()
    with pytest.raises(LinkDownError):
        ask(service)
    with pytest.raises(UnavailableError, match="incarnation 8, not 9"):
        service.check_health()
    service.close()


def test_a_service_that_does_not_listen_is_not_healthy(folder: Path, handler: Moody) -> None:
    service = ProposerService(handler, socket_dir=folder, incarnation=3, fingerprint="llama")
    service.close()
    with pytest.raises(UnavailableError, match=r"does not listen at .*3\.sock"):
        service.check_health()
    service.start()
    service.check_health()
    service.close()
    service.close()
    with pytest.raises(UnavailableError):
        service.check_health()


def test_a_listener_that_dies_is_noticed(service: ProposerService) -> None:
    assert service._server is not None
    service._server._listener.shutdown(2)
    service._server._acceptor.join(10)
    with pytest.raises(UnavailableError, match="does not listen"):
        service.check_health()
