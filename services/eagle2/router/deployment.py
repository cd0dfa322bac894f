"""The router as a Serve deployment: the HTTP ingress. Its replicas never import torch."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from eagle2.config import Settings
from eagle2.router.api import create_app
from eagle2.router.buckets import shared_buckets
from eagle2.router.serve_verifier import ServeVerifier
from eagle2.router.settings import RouterSettings
from eagle2.router.single_fleet import SingleFleet
from eagle2.router.tenants import KeyFile
from eagle2.session.stores import create_store

_UNBOUNDED = 1 << 20


class Router:
    """One replica: the HTTP API in front of the verifiers."""

    def __init__(self, settings: Settings, verifiers: DeploymentHandle[Any]) -> None:
        # Serve spreads requests over the verifiers and bounds nothing: their engines hold the queues.
        self._fleet = SingleFleet(ServeVerifier(verifiers), _UNBOUNDED)
        self._store = create_store(settings.session)
        self._admission = settings.admission
        self._settings = RouterSettings.of(settings)
        self._keys = KeyFile.of(settings.tenants)
        self._buckets = shared_buckets(settings.session)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this once, after the constructor."""
        return create_app(
            self._fleet,
            self._settings,
            store=self._store,
            admission=self._admission,
            keys=self._keys,
            shared_buckets=self._buckets,
        )


router = serve.deployment(name="Router")(serve.ingress()(Router))
