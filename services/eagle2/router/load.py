"""How busy the replicas are: what this router has in flight, and what the other routers say of themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from eagle2.protocol.fleet import Replica
from eagle2.session.store import Placement, SessionStore
from eagle2.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sequences that the fleet decodes at once, and how many of them this router may have in flight."""

    total: int
    places: int


class InFlight:
    """Sequences in flight by replica uid: this router's own, and what was last heard of the others.

    What was heard counts for ``trust_s`` seconds. ``clock`` is monotonic.
    """

    def __init__(self, *, clock: Callable[[], float], trust_s: float = 5.0) -> None:
        raise NotImplementedError

    @contextmanager
    def at(self, uid: str) -> Iterator[None]:
        """Count one sequence at a replica while the block runs."""
        raise NotImplementedError
        yield

    def counts(self) -> dict[str, int]:
        """This router's own, by uid; replicas without any are left out."""
        raise NotImplementedError

    def heard(self, placement: Placement) -> None:
        """Remember what the other routers have in flight."""
        raise NotImplementedError

    def capacity(self, replicas: Sequence[Replica]) -> Capacity:
        """The fleet as this router may use it: what others leave, and an equal share of all in any case."""
        raise NotImplementedError


class LoadReports:
    """Tells the store every ``interval_s`` what this router has in flight, as a lease of three intervals.

    The same trip brings back what the others said. A store that fails costs nothing but the news.
    """

    def __init__(
        self,
        store: SessionStore,
        in_flight: InFlight,
        recorder: Recorder,
        *,
        router: str,
        interval_s: float = 1.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        raise NotImplementedError

    async def run(self) -> None:
        """Report until cancelled; then take the report back, as far as the store lets."""
        raise NotImplementedError

    async def report(self) -> None:
        """Report once and listen once. Raises nothing."""
        raise NotImplementedError
