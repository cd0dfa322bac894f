"""A router's inner side without HTTP: admission, placement and failover over a fleet that a test has."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from eagle2.config import AdmissionSettings, RoutingSettings
from eagle2.protocol import Commit, Fleet, GenerationRequest, Usage
from eagle2.router.admission import Admission
from eagle2.router.destinations import Route
from eagle2.router.failover import RoutedVerifier
from eagle2.router.load import InFlight
from eagle2.router.work import WorkEstimate
from eagle2.session.store import SessionStore
from eagle2.telemetry.metrics import Metric
from eagle2.telemetry.recorder import Recorder


@dataclass
class Received:
    """What a client has got of one answer."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    commits: int = 0

    @property
    def whole(self) -> tuple[list[int], str, str | None]:
        return self.ids, self.text, self.finish_reason

    def add(self, commit: Commit) -> None:
        assert self.finish_reason is None, "nothing comes behind the end"
        assert commit.token_ids or commit.text or commit.finish_reason, "clients get no empty items"
        self.ids.extend(commit.token_ids)
        self.text += commit.text
        self.finish_reason, self.usage = commit.finish_reason, commit.usage
        self.commits += 1


class FakeRouter:
    """One router. ``routing`` names settings that differ from those of a quick test."""

    def __init__(
        self, fleet: Fleet, store: SessionStore, *, clock: Callable[[], float] = time.monotonic, **routing: Any
    ) -> None:
        self.recorder = Recorder()
        self.in_flight = InFlight(clock=clock)
        self.settings = RoutingSettings(**{"progress_timeout_s": 0.25, "failover_wait_s": 5.0, **routing})
        work = WorkEstimate(256)
        self.admission = Admission(
            AdmissionSettings(),
            lambda: self.in_flight.capacity(fleet.replicas()),
            work,
            self.recorder,
            clock=time.time,
            poll_s=0.01,
        )
        self.verifier = RoutedVerifier(
            fleet, store, self.admission, self.in_flight, work, self.settings, self.recorder, clock=clock
        )

    async def answer(
        self,
        request: GenerationRequest,
        route: Route | None = None,
        *,
        on_commit: Callable[[Received], None] = lambda _: None,
    ) -> Received:
        """The whole answer; ``on_commit`` sees it grow."""
        received = Received()
        stream = cast("Any", self.verifier.generate(request, route or Route()))
        async with aclosing(stream):
            async for commit in stream:
                received.add(commit)
                on_commit(received)
        return received

    def count(self, metric: Metric, **labels: object) -> float:
        return self.recorder.get(metric, **labels)
