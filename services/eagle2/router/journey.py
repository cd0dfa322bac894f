"""One request on its way through the fleet: which replica it is at, why it left the last one, when it gives up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from eagle2.config import RoutingSettings
from eagle2.errors import UnavailableError
from eagle2.protocol import Commit, Fleet, Replica
from eagle2.router.answer import Answer
from eagle2.router.attempt import Attempt, BrokenError
from eagle2.router.cooldown import Cooldown
from eagle2.router.destinations import Destinations, Route
from eagle2.router.failures import GenerationError
from eagle2.router.load import InFlight
from eagle2.router.probation import Probation, Trial
from eagle2.router.quarantine import Quarantine
from eagle2.router.retries import RetryBudget
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Means:
    """What all requests of a router share. ``clock`` is monotonic, ``wall_clock`` Unix time."""

    fleet: Fleet
    destinations: Destinations
    in_flight: InFlight
    probation: Probation
    cooldown: Cooldown
    quarantine: Quarantine
    budget: RetryBudget
    settings: RoutingSettings
    recorder: Recorder
    close_timeout_s: float
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    closing: set[asyncio.Task[None]] = field(default_factory=set)


class Journey:
    """The attempts of one request: each is ``begin``, ``next`` until it is None, and ``leave``; at last ``end``."""

    def __init__(self, means: Means, answer: Answer, route: Route) -> None:
        self._means, self._answer, self._route = means, answer, route
        self._excluded: set[str] = set()
        self._failures = 0
        self._last_sentence = "No verifier can take the request now."
        self._replica: Replica | None = None
        self._attempt: Attempt | None = None
        self._trial: Trial | None = None
        self._broken = False
        self._count = ExitStack()
        self._last_out: float | None = None
        self._stalled_since: float | None = None

    async def begin(self) -> None:
        """Start an attempt. Raises UnavailableError when there is nowhere to go, GenerationError at the deadline."""
        means, request = self._means, self._answer.request
        found = await means.destinations.find(
            request.request_id, self._route, self._excluded, wait_s=self._patience_s()
        )
        if found is None:
            raise self._nowhere()
        self._replica, self._trial = found
        self._broken = False
        self._count.enter_context(means.in_flight.at(self._replica.uid))
        self._attempt = Attempt(
            means.fleet.generate(self._replica, self._answer.begin()),
            progress_timeout_s=means.settings.progress_timeout_s,
            close_timeout_s=means.close_timeout_s,
        )

    async def next(self) -> Commit | None:
        """The next commit with anything in it; None when the replica let the request down, which may go on elsewhere.

        Raises RequestError as the replica does or for one that crashes replicas, UnavailableError to give up.
        """
        assert self._attempt is not None
        assert self._trial is not None
        while True:
            try:
                commit = await self._attempt.next()
            except BrokenError as broken:
                self._give_up_or_go_on(broken)
                return None
            if self._means.probation.received(self._trial, has_tokens=bool(commit.token_ids)):
                self._means.destinations.freed(self._answer.request.request_id)
            if commit.token_ids or commit.text or commit.finish_reason is not None:
                return self._taken(commit)

    def handed_over(self) -> None:
        """The client has what ``next`` returned last."""
        if self._answer.has_tokens:
            self._last_out = self._means.clock()

    async def leave(self) -> None:
        """End the attempt: at once, or in the background where its replica may not answer any more."""
        attempt, trial = self._attempt, self._trial
        self._attempt = self._trial = None
        try:
            if trial is not None:
                self._means.probation.ended(trial)
                self._means.destinations.freed(self._answer.request.request_id)
            if attempt is None:
                return
            if not self._broken:
                await attempt.close()
                return
            closing = asyncio.create_task(attempt.close())
            self._means.closing.add(closing)
            closing.add_done_callback(self._means.closing.discard)
        finally:
            self._count.close()

    def end(self) -> None:
        """The request is over."""
        self._means.probation.forget(self._answer.request.request_id)

    def _taken(self, commit: Commit) -> Commit:
        means = self._means
        assert self._replica is not None
        if commit.token_ids:
            if not self._answer.has_tokens:
                means.destinations.holds(self._route, self._replica)
            if self._stalled_since is not None:
                means.recorder.add(metrics.STREAMS_RESUMED)
                means.recorder.observe(metrics.STALL_SECONDS, means.clock() - self._stalled_since)
                self._stalled_since = None
        if commit.finish_reason in ("stop", "length"):
            means.cooldown.worked(self._replica)
        return self._answer.take(commit)

    def _give_up_or_go_on(self, broken: BrokenError) -> None:
        means, replica, trial, request = self._means, self._replica, self._trial, self._answer.request
        assert replica is not None
        assert trial is not None
        self._broken = True
        self._last_sentence = str(broken)
        self._excluded.add(replica.incarnation)
        if self._stalled_since is None:
            self._stalled_since = self._last_out
        means.recorder.add(metrics.FAILOVERS, reason=broken.failure)
        means.cooldown.failed(replica)
        _LOG.warning("request %s leaves %s: %s", request.request_id, replica.uid, broken.failure)
        if broken.failure == "drain":
            return
        if broken.failure == "crash":
            verdict = means.probation.crashed(trial)
            means.destinations.freed(request.request_id)
            if verdict == "guilty":
                means.recorder.add(metrics.REQUESTS_QUARANTINED)
                _LOG.error("request %s was tried alone when a second verifier crashed", request.request_id)
                raise means.quarantine.put(request) from broken
            means.recorder.add(metrics.SUSPECTS, float(verdict == "suspect"))
        self._failures += 1
        if self._failures >= means.settings.max_attempts:
            means.recorder.add(metrics.RETRIES_REFUSED, reason="attempts")
            raise UnavailableError(f"The request was tried {self._failures} times. {broken}") from broken
        if not means.budget.take():
            means.recorder.add(metrics.RETRIES_REFUSED, reason="budget")
            raise UnavailableError(f"Too many requests are tried again just now. {broken}") from broken

    def _patience_s(self) -> float:
        settings, request = self._means.settings, self._answer.request
        wait_s = settings.failover_wait_s
        if self._means.probation.is_suspect(request.request_id):
            wait_s += settings.progress_timeout_s  # so long another suspect may take that shows no sign of life
        if request.deadline is not None:
            wait_s = min(wait_s, request.deadline - self._means.wall_clock())
        return max(0.0, wait_s)

    def _nowhere(self) -> Exception:
        deadline = self._answer.request.deadline
        if deadline is not None and self._means.wall_clock() >= deadline:
            return GenerationError("The deadline passed while no verifier could go on.", "deadline_exceeded")
        self._means.recorder.add(metrics.RETRIES_REFUSED, reason="no_replica")
        return UnavailableError(self._last_sentence)
