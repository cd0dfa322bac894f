"""Time that passes by what is done: forwards and drafts take as long as a test says, on two devices at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from eagle2.engine.target import TargetRunner
from eagle2.models.rows import Rows
from eagle2.transport.base import ProposerLink
from eagle2.transport.messages import DraftReply, DraftStep
from fakes.links import WrappedLink


class ManualClock:
    """Seconds; stands still unless somebody takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)


class TimedLink(WrappedLink):
    """A proposer that needs ``draft_s(trees)`` seconds for a step with so many trees, while the clock goes on.

    With ``is_blocking`` it does not: the time passes while the step is sent.
    """

    def __init__(
        self, inner: ProposerLink, clock: ManualClock, draft_s: Callable[[int], float], *, is_blocking: bool = False
    ) -> None:
        super().__init__(inner)
        self._clock, self._draft_s, self._is_blocking = clock, draft_s, is_blocking
        self._ready: deque[float] = deque()

    def send(self, step: DraftStep) -> None:
        self.inner.send(step)
        begin = max([self._clock.now, *self._ready])
        self._ready.append(begin + self._draft_s(sum(entry.draft for entry in step.entries)))
        if self._is_blocking:
            self._clock.wait_until(self._ready[-1])

    def receive(self, timeout_s: float) -> DraftReply | None:
        if not self._ready:
            return self.inner.receive(timeout_s)
        self._clock.wait_until(self._ready.popleft())
        return self.inner.receive(timeout_s)


def time_forwards(target: TargetRunner, clock: ManualClock, verify_s: Callable[[Rows], float]) -> None:
    """Every forward of ``target`` takes ``verify_s(rows)`` seconds."""
    forward = target.forward

    def timed(rows: Rows) -> Tensor:
        clock.now += verify_s(rows)
        return forward(rows)

    target.forward = timed  # type: ignore[method-assign]
