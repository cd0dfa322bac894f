"""A fleet of one verifier that lives in this process."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

from eagle2.protocol import Commit, GenerationRequest, ModelDescription, Replica, Verifier


class SingleFleet:
    """Implements ``eagle2.protocol.Fleet``. ``max_sequences``: what the verifier decodes at once; more wait outside."""

    def __init__(self, verifier: Verifier, max_sequences: int) -> None:
        self._verifier = verifier
        self._replica = Replica("local", secrets.token_hex(8), max_sequences)

    def replicas(self) -> tuple[Replica, ...]:
        return (self._replica,)

    def generate(self, replica: Replica, request: GenerationRequest) -> AsyncIterator[Commit]:
        assert replica == self._replica, f"there is no replica {replica.uid} here"
        return self._verifier.generate(request)

    async def describe(self) -> ModelDescription:
        return await self._verifier.describe()

    async def stats(self) -> dict[str, float]:
        return await self._verifier.stats()
