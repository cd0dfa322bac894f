"""A router over a real engine in this process: everything but Ray, on a loopback port."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from eagle2.engine.draft import DraftRunner
from eagle2.router.api import create_app
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet
from eagle2.verifier.service import VerifierService
from fakes.engines import EngineKit, draft_head
from fakes.server import serving
from fakes.verifier import describe


@dataclass(frozen=True, slots=True)
class Stack:
    """``url`` of the HTTP API, and what stands behind it."""

    url: str
    kit: EngineKit
    handler: DraftRunner


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The golden model A with its trained head, 8 sequences at once."""
    handler = draft_head()
    kit = EngineKit(handler)
    service = VerifierService(kit.engine, describe())
    with serving(create_app(SingleFleet(service, 256), RouterSettings())) as url:
        yield Stack(url, kit, handler)
    service.close()
