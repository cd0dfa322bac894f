"""The verifiers that a router can choose from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from eagle2.protocol.generation import Commit, GenerationRequest, ModelDescription


@dataclass(frozen=True, slots=True)
class Replica:
    """One life of one verifier.

    ``uid`` names it where it runs, and may come back after a restart; ``incarnation`` never does, so what is known of
    another incarnation (whose KV cache it holds) is known of nobody. ``max_sequences``: what it decodes at once.
    """

    uid: str
    incarnation: str
    max_sequences: int


class Fleet(Protocol):
    """Verifiers behind one name: all serve the same model, and each gives the same tokens for the same request."""

    def replicas(self) -> tuple[Replica, ...]:
        """Those that take requests, as far as is known now. Waits for nothing; one of them may be dead already."""
        ...

    def generate(self, replica: Replica, request: GenerationRequest) -> AsyncIterator[Commit]:
        """Stream one generation from one replica. Closing the iterator ends the decoding.

        A commit without tokens and text says that the engine is at work; as the first one it says that the request was
        taken, so that a crash after it may be the request's doing. Raises ``RequestError`` for a request that
        does not fit the model, ``DrainingError`` when the replica takes no new requests, and ``UnavailableError`` when
        it is gone, also in the middle of the stream.
        """
        ...

    async def describe(self) -> ModelDescription:
        """The model of all replicas. Waits for a replica to be there; callers bound that."""
        ...

    async def stats(self) -> dict[str, float]:
        """Counters and gauges of one replica by metric name. Raises ``UnavailableError``."""
        ...
