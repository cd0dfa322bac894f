"""From settings to a running verifier, in a Serve replica or in one process with its drafter."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

from eagle2.config import Settings
from eagle2.engine.assemble import Checkpoint, build_engine, describe, load_checkpoint, load_draft_runner
from eagle2.engine.pair import Connect
from eagle2.models.dtype import use_threads
from eagle2.transport.base import ProposerLink
from eagle2.transport.local import LocalLink
from eagle2.verifier.service import VerifierService

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


_HEARTBEAT_S = 1.0


def start_verifier(
    settings: Settings, proposers: DeploymentHandle[Any] | None, loop: asyncio.AbstractEventLoop, incarnation: int
) -> VerifierService:
    """A verifier whose proposer is a deployment of its own, leased on the same node. ``loop``: the replica's."""
    checkpoint = load_checkpoint(settings.model)
    connect = None
    if proposers is not None:
        from eagle2.verifier.pairing import NodePairing

        connect = NodePairing(
            proposers,
            loop,
            incarnation=incarnation,
            fingerprint=checkpoint.fingerprint,
            wait_s=settings.pair.pair_wait_s,
        ).connect
    engine = build_engine(settings, checkpoint, connect, incarnation)
    return VerifierService(engine, describe(settings, checkpoint), heartbeat_s=_HEARTBEAT_S)


def start_in_one_process(settings: Settings) -> VerifierService:
    """The same engine with the drafter in the same process: no Ray, no socket."""
    use_threads(settings.engine.threads)
    checkpoint = load_checkpoint(settings.model)
    engine = build_engine(settings, checkpoint, connect_in_process(settings, checkpoint), new_incarnation())
    return VerifierService(engine, describe(settings, checkpoint))


def connect_in_process(settings: Settings, checkpoint: Checkpoint) -> Connect | None:
    """A drafter in this process, loaded now, for one engine; None where the settings name no draft head."""
    if settings.model.draft is None:
        return None
    incarnation = new_incarnation()
    runner = load_draft_runner(settings, checkpoint, incarnation)

    def connect() -> ProposerLink:
        return LocalLink(runner, incarnation=incarnation)

    return connect


def new_incarnation() -> int:
    """A number for one life of a process, never used again."""
    return secrets.randbits(63)
