"""The composition root: settings become a Serve application. Named by ``serve.yaml`` as its import path."""

from __future__ import annotations

from typing import Any

from ray.serve import Application, Deployment

from eagle2.config import Settings, load_settings
from eagle2.proposer.deployment import draft_proposer
from eagle2.router.deployment import router
from eagle2.verifier.deployment import target_verifier


def build(args: dict[str, Any]) -> Application:
    """The application for the ``args`` of a Serve config. Raises ``ConfigError`` for what cannot be set.

    Runs in Serve's build task, where no model is loaded. The environment is not read here: a config that is
    deployed must mean the same on every node.
    """
    return compose(load_settings(args))


def compose(
    settings: Settings,
    *,
    proposer: Deployment = draft_proposer,
    verifier: Deployment = target_verifier,
    ingress: Deployment = router,
) -> Application:
    """Wire router, verifier and (when there is a draft) proposer together."""
    proposers = None if settings.model.draft is None else proposer.bind(settings)
    return ingress.bind(settings, verifier.bind(settings, proposers))
