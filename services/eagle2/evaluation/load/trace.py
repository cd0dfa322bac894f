"""What a client saw of its answers, and when."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from eagle2.errors import Eagle2Error
from eagle2.protocol import Commit, FinishReason, GenerationRequest, Verifier

Clock = Callable[[], float]


@dataclass(slots=True)
class Answer:
    """One request. Times are the clock's seconds. ``due`` is when it was to be sent, ``sent`` when it was.

    ``commits`` are (time, tokens) of what came, the first token among them. ``finish_reason`` None: it was cut off.
    """

    prompt: str
    due: float
    sent: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    commits: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def first_token_s(self) -> float | None:
        """From when it was due, so that no lateness of the client is hidden; None before there is a token."""
        return self.commits[0][0] - self.due if self.commits else None


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment: the clock and the CPU time of all processes, in seconds, and the engine's metrics."""

    time: float
    cpu_s: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Trace:
    """A load from its start to its end. What is measured lies between ``begin`` and ``end``."""

    answers: list[Answer]
    begin: Reading
    end: Reading


async def ask(
    verifier: Verifier, request: GenerationRequest, answer: Answer, clock: Clock, on_commit: Callable[[Answer], None]
) -> None:
    """Send a request and note what comes. Raises ``Eagle2Error`` where it ends in an error."""
    answer.sent = clock()
    async with aclosing(cast("AsyncGenerator[Commit, None]", verifier.generate(request))) as stream:
        async for commit in stream:
            if commit.finish_reason == "error":
                raise Eagle2Error(commit.error or "The generation ended in an error that has no name.")
            answer.finish_reason = commit.finish_reason
            if commit.token_ids:
                answer.commits.append((clock(), len(commit.token_ids)))
                answer.token_ids.extend(commit.token_ids)
                on_commit(answer)
