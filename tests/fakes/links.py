"""Links that misbehave in one way each, around any link that works."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from eagle2.errors import LinkDownError
from eagle2.transport.base import ProposerLink
from eagle2.transport.messages import DraftReply, DraftStep
from fakes.drafts import BookkeepingHandler, OracleHandler, RandomHandler

__all__ = [
    "BookkeepingHandler",
    "DelayedLink",
    "DuplicatingLink",
    "DyingLink",
    "ForeignLink",
    "OracleHandler",
    "RandomHandler",
    "StaleLink",
    "WrappedLink",
]


class WrappedLink:
    """Passes everything on; the others change one thing. ``inner`` is open to tests."""

    def __init__(self, inner: ProposerLink) -> None:
        self.inner = inner
        self.incarnation = inner.incarnation

    def send(self, step: DraftStep) -> None:
        self.inner.send(step)

    def receive(self, timeout_s: float) -> DraftReply | None:
        return self.inner.receive(timeout_s)

    def close(self) -> None:
        self.inner.close()


class DelayedLink(WrappedLink):
    """Holds each reply back for ``late`` calls of ``receive``, which find nothing in time."""

    def __init__(self, inner: ProposerLink, late: int = 1) -> None:
        super().__init__(inner)
        self._late = late
        self._waits = late
        self._reply: DraftReply | None = None

    def receive(self, timeout_s: float) -> DraftReply | None:
        if self._reply is None:
            self._reply = self.inner.receive(timeout_s)
            self._waits = self._late
        if self._reply is None:
            return None
        if self._waits > 0:
            self._waits -= 1
            return None
        reply, self._reply = self._reply, None
        return reply


class _InsertingLink(WrappedLink):
    """Delivers replies that nobody asked for before or after the true one."""

    def __init__(self, inner: ProposerLink) -> None:
        super().__init__(inner)
        self._waiting: deque[DraftReply] = deque()

    def receive(self, timeout_s: float) -> DraftReply | None:
        if not self._waiting:
            reply = self.inner.receive(timeout_s)
            if reply is not None:
                self._waiting.extend(self.around(reply))
        return self._waiting.popleft() if self._waiting else None

    def around(self, reply: DraftReply) -> list[DraftReply]:
        """What is delivered instead of ``reply``."""
        raise NotImplementedError


class DuplicatingLink(_InsertingLink):
    """Delivers every reply twice."""

    def around(self, reply: DraftReply) -> list[DraftReply]:
        return [reply, reply]


class StaleLink(_InsertingLink):
    """Delivers the reply to the step before once more, ahead of each new one."""

    def __init__(self, inner: ProposerLink) -> None:
        super().__init__(inner)
        self._last: DraftReply | None = None

    def around(self, reply: DraftReply) -> list[DraftReply]:
        last, self._last = self._last, reply
        return [reply] if last is None else [last, reply]


class ForeignLink(_InsertingLink):
    """Delivers each reply first as if another incarnation of the proposer had written it."""

    def __init__(self, inner: ProposerLink, incarnation: int) -> None:
        super().__init__(inner)
        self._foreign = incarnation

    def around(self, reply: DraftReply) -> list[DraftReply]:
        return [replace(reply, incarnation=self._foreign), reply]


class DyingLink(WrappedLink):
    """Answers ``steps`` steps and dies: while the verifier waits for the next reply, or already when it sends."""

    def __init__(self, inner: ProposerLink, steps: int, *, at_send: bool = False) -> None:
        super().__init__(inner)
        self._left = steps
        self._at_send = at_send
        self._dead = False

    def send(self, step: DraftStep) -> None:
        self._check()
        if self._left == 0:
            self._dead = True
            self.inner.close()
            if self._at_send:
                self._check()
            return  # receive finds out
        self._left -= 1
        self.inner.send(step)

    def receive(self, timeout_s: float) -> DraftReply | None:
        self._check()
        return self.inner.receive(timeout_s)

    def _check(self) -> None:
        if self._dead:
            raise LinkDownError("the proposer died, as this test asked")
