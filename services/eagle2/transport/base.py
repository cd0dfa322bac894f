"""The verifier's end of a pair, whatever carries it."""

from __future__ import annotations

from typing import Protocol

from eagle2.transport.messages import DraftReply, DraftStep


class DraftHandler(Protocol):
    """What stands behind a link on the proposer's side. Called from one thread at a time."""

    def handle(self, step: DraftStep) -> DraftReply: ...

    def reset(self) -> None:
        """Forget every sequence (a new verifier has taken the lease)."""
        ...


class ProposerLink(Protocol):
    """One open connection to a proposer; used by the engine thread only.

    Every wait has a deadline. After ``LinkDownError`` the link is dead and must be closed and made anew.
    """

    incarnation: int

    def send(self, step: DraftStep) -> None:
        """Hand over a step without waiting for its reply. Raises ``LinkDownError``."""
        ...

    def receive(self, timeout_s: float) -> DraftReply | None:
        """The next reply, None when none came in time. Raises ``LinkDownError`` when the peer is gone.

        Replies may be late, doubled or of an older step; the engine matches them.
        """
        ...

    def close(self) -> None: ...
