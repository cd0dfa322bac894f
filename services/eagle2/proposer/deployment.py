"""The proposer as a Serve deployment: lifecycle and metadata, no traffic (that goes over the pair's socket)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray import serve

from eagle2.config import Settings

if TYPE_CHECKING:
    from eagle2.proposer.service import ProposerService


class DraftProposer:
    """One replica: a draft head behind a socket that one verifier at a time may lease."""

    _service: ProposerService

    def __init__(self, settings: Settings) -> None:
        # Imported here: the build task and the router import this module too, and torch is not wanted there.
        from eagle2.proposer.start import start_proposer

        self._service = start_proposer(settings)

    def record_replica_metadata(self) -> dict[str, str]:
        """What verifiers of this node learn without a call: where the socket is, and which life this is."""
        return self._service.metadata()

    def check_health(self) -> None:
        """Raises when the service can no longer draft; Serve then replaces the replica."""
        self._service.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close()


draft_proposer = serve.deployment(
    name="DraftProposer",
    request_router_config={"request_router_class": "eagle2.proposer.placement:NodeStrictRouter"},
)(DraftProposer)
