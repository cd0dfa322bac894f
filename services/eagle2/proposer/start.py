"""From settings to a running proposer."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from eagle2.config import Settings
from eagle2.engine.assemble import load_checkpoint, load_draft_runner
from eagle2.models.dtype import use_threads
from eagle2.proposer.service import ProposerService


def start_proposer(settings: Settings) -> ProposerService:
    """Load the draft head and listen. Raises ``ModelError`` when the head does not fit the target."""
    use_threads(settings.engine.threads)
    checkpoint = load_checkpoint(settings.model)
    incarnation = secrets.randbits(63)
    service = ProposerService(
        load_draft_runner(settings, checkpoint, incarnation),
        socket_dir=Path(settings.pair.socket_dir or tempfile.gettempdir()) / "eagle2",
        incarnation=incarnation,
        fingerprint=checkpoint.fingerprint,
    )
    service.start()
    return service
