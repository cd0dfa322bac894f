"""The router as a Serve deployment: the HTTP ingress. Its replicas never import torch."""

from __future__ import annotations

import sys
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from eagle2.config import Settings
from eagle2.router.api import create_app
from eagle2.router.buckets import shared_buckets
from eagle2.router.serve_fleet import ServeFleet
from eagle2.router.settings import RouterSettings
from eagle2.router.tenants import KeyFile
from eagle2.session.stores import create_store

# A thread that parses a large body gives way to the event loop after so long. The default of 5 ms is waited for again
# and again: at every callback of the loop.
_SWITCH_INTERVAL_S = 0.0005


class Router:
    """One replica: the HTTP API in front of the verifiers."""

    def __init__(self, settings: Settings, verifiers: DeploymentHandle[Any]) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._settings, self._http = settings, RouterSettings.of(settings)
        self._fleet = ServeFleet(verifiers, drain_s=settings.routing.drain_s)
        self._store = create_store(settings.session)
        self._keys = KeyFile.of(settings.tenants)
        self._buckets = shared_buckets(settings.session)
        self._app: FastAPI | None = None

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What there is to do, for ``eagle2.autoscaling.policy``."""
        return {} if self._app is None else self._app.state.routing.admission.autoscaling_stats()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this once, after the constructor."""
        self._app = create_app(
            self._fleet,
            self._http,
            store=self._store,
            router=serve.get_replica_context().replica_id.unique_id,
            routing=self._settings.routing,
            admission=self._settings.admission,
            prefill_chunk=self._settings.engine.prefill_chunk,
            keys=self._keys,
            shared_buckets=self._buckets,
        )
        return self._app


router = serve.deployment(name="Router")(serve.ingress()(Router))
