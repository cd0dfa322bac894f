"""A pair within one process: the proposer's handler is called where the verifier stands."""

from __future__ import annotations

from collections import deque

from eagle2.errors import LinkDownError
from eagle2.transport.base import DraftHandler
from eagle2.transport.messages import DraftReply, DraftStep


class LocalLink:
    """A ``ProposerLink`` without a wire.

    The handler runs inside ``send``, in the caller's thread, so what a caller does to its tensors afterwards cannot
    reach a step that it has already handed over. ``receive`` never waits: a reply is there, or none will come. A new
    link is a new lease: it resets the handler.
    """

    def __init__(self, handler: DraftHandler, *, incarnation: int = 0) -> None:
        self.incarnation = incarnation
        self._handler = handler
        self._replies: deque[DraftReply] = deque()
        self._down: str | None = None
        handler.reset()

    def send(self, step: DraftStep) -> None:
        """Handle the step now. A handler that raises takes the link down, as it would on the other side of a wire."""
        if self._down is not None:
            raise LinkDownError(self._down)
        try:
            self._replies.append(self._handler.handle(step))
        except Exception as error:
            self._down = f"the draft handler failed on step {step.step}: {error!r}"
            raise LinkDownError(self._down) from error

    def receive(self, timeout_s: float) -> DraftReply | None:  # noqa: ARG002  (nothing to wait for)
        """The oldest reply not taken yet, None when there is none. Raises ``LinkDownError`` once the link is down."""
        if self._replies:
            return self._replies.popleft()
        if self._down is not None:
            raise LinkDownError(self._down)
        return None

    def close(self) -> None:
        self._replies.clear()
        self._down = "the link is closed"
