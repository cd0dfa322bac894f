"""A fault that speculation must never have: other tokens than plain decoding's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from eagle2.protocol import Commit, GenerationRequest
from eagle2.verifier.service import VerifierService


def change_drafted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every verifier gives other tokens with speculation than without."""
    original = VerifierService.generate

    async def generate(self: VerifierService, request: GenerationRequest) -> AsyncIterator[Commit]:
        async for commit in original(self, request):
            changed = tuple(token ^ 1 for token in commit.token_ids) if request.speculation else commit.token_ids
            yield replace(commit, token_ids=changed)

    monkeypatch.setattr(VerifierService, "generate", generate)
