"""Answers that survive their verifier: the stream of one goes on from another, each token once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

from eagle2.config import RoutingSettings
from eagle2.protocol import Commit, Fleet, GenerationRequest
from eagle2.router.admission import Admission
from eagle2.router.answer import Answer
from eagle2.router.cooldown import Cooldown
from eagle2.router.destinations import Destinations, Route
from eagle2.router.journey import Journey, Means
from eagle2.router.load import InFlight
from eagle2.router.probation import Probation
from eagle2.router.quarantine import Quarantine
from eagle2.router.retries import RetryBudget
from eagle2.router.work import WorkEstimate
from eagle2.session.store import SessionStore
from eagle2.telemetry.recorder import Recorder


class RoutedVerifier:
    """All verifiers of a fleet as one that does not die.

    A request waits for its place once; then it is sent to the replica that knows most of it, and sent on when that
    one crashes, hangs, drains or falls silent. What goes on is prompt, tokens and text already sent, seed and deadline:
    a token depends on nothing else, so the client sees the same answer continue. Counts are those of the whole answer
    (``Answer.whole_usage``).
    """

    def __init__(
        self,
        fleet: Fleet,
        store: SessionStore,
        admission: Admission,
        in_flight: InFlight,
        work: WorkEstimate,
        settings: RoutingSettings,
        recorder: Recorder,
        *,
        close_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock`` is monotonic, ``wall_clock`` Unix time: deadlines are of the latter."""
        self._admission, self._work = admission, work
        probation, cooldown = Probation(), Cooldown(clock=clock)
        self._means = Means(
            fleet=fleet,
            destinations=Destinations(fleet, store, in_flight, probation, cooldown, settings, recorder, clock=clock),
            in_flight=in_flight,
            probation=probation,
            cooldown=cooldown,
            quarantine=Quarantine(settings.quarantine_s, clock=clock),
            budget=RetryBudget(settings.retry_share, settings.retry_burst),
            settings=settings,
            recorder=recorder,
            close_timeout_s=close_timeout_s,
            clock=clock,
            wall_clock=wall_clock,
        )

    async def generate(self, request: GenerationRequest, route: Route) -> AsyncIterator[Commit]:
        """Stream one answer; no commit is empty. Closing the iterator ends the decoding wherever it is.

        Raises ``RequestError`` (``OverloadedError`` with a time to come back, the code ``request_quarantined`` for one
        that crashes verifiers), ``GenerationError`` when the deadline passes while it waits, and ``UnavailableError``
        when no verifier can go on with it; all of them also behind tokens that are out.
        """
        self._means.quarantine.check(request)
        self._means.budget.requested()
        max_tokens = request.stop.max_tokens
        work = self._work.cycles(len(request.prompt_ids), max_tokens)
        async with self._admission.place(request.tenant, request.priority, work, request.deadline) as place:
            journey = Journey(self._means, Answer(request), route)
            is_finished = False
            try:
                while not is_finished:
                    try:
                        await journey.begin()
                        while (commit := await journey.next()) is not None:
                            is_finished = commit.finish_reason is not None
                            if commit.usage is not None:
                                place.finished(commit.usage, max_tokens)
                            yield commit
                            if is_finished:
                                break
                            journey.handed_over()
                    finally:
                        await journey.leave()
            finally:
                journey.end()
