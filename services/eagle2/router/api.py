"""The HTTP API: an OpenAI-style server in front of a fleet of verifiers. Imports no torch."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from eagle2.config import AdmissionSettings, RoutingSettings
from eagle2.errors import RequestError, UnavailableError
from eagle2.protocol import Fleet
from eagle2.router.buckets import Buckets
from eagle2.router.failures import GenerationError, JSONReply, describe_failure, error_reply, failure_headers
from eagle2.router.gate import RequestGate
from eagle2.router.generations import Generations
from eagle2.router.model import ModelSource
from eagle2.router.probes import Probes
from eagle2.router.quotas import Quotas
from eagle2.router.routing import Routing
from eagle2.router.schemas import ChatBody, CompletionBody
from eagle2.router.settings import RouterSettings
from eagle2.router.tenants import KeyFile
from eagle2.session.breaker import GuardedStore
from eagle2.session.memory import MemorySessionStore
from eagle2.telemetry.recorder import Recorder

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
_SESSION_TTL_S, _STORE_RETRY_S = 3600.0, 2.0  # of a store that one router has for itself

ENDPOINTS = frozenset({CHAT, COMPLETIONS, MODELS, "/health", "/ready", "/metrics"})


def draw_seed() -> int:
    """A seed for a request that names none: 64 random bits."""
    return secrets.randbits(64)


def create_app(
    fleet: Fleet,
    settings: RouterSettings,
    *,
    store: GuardedStore | None = None,
    router: str | None = None,
    routing: RoutingSettings | None = None,
    admission: AdmissionSettings | None = None,
    prefill_chunk: int = 256,
    draw_seed: Callable[[], int] = draw_seed,
    clock: Callable[[], float] = time.time,
    keys: KeyFile | None = None,
    shared_buckets: Buckets | None = None,
) -> FastAPI:
    """The application in front of ``fleet``. ``clock`` is the Unix time in seconds.

    store: what routers share; without one this router is alone. router: its name there and in responses, drawn when
    None. routing: None is for a fleet that never gets another replica, so that nothing waits for one. prefill_chunk:
    the verifiers'. keys: who is served, None for everybody. shared_buckets: where all routers count what keys use.
    """
    recorder = Recorder()
    router = router or secrets.token_hex(8)
    quotas = Quotas(recorder, shared_buckets)
    way = Routing(
        fleet,
        store or GuardedStore(MemorySessionStore(_SESSION_TTL_S), _STORE_RETRY_S),
        recorder,
        router=router,
        routing=routing or RoutingSettings(failover_wait_s=0),
        admission=admission or AdmissionSettings(ready_grace_s=0),
        prefill_chunk=prefill_chunk,
        close_timeout_s=settings.close_timeout_s,
        clock=clock,
    )
    models = ModelSource(fleet, settings)
    probes = Probes(way, models, recorder, settings)
    generations = Generations(way.verifier, models, settings, recorder, quotas, draw_seed=draw_seed, clock=clock)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with way.running():
            yield
            generations.close()
            await quotas.settle()

    # No interactive documentation: its pages load scripts from elsewhere.
    app = FastAPI(title="eagle2", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.routing = way  # whoever runs the app reports its queue to the autoscaler
    app.add_middleware(RequestGate, recorder=recorder, endpoints=ENDPOINTS, keys=keys, router=router)
    for kind in (RequestError, UnavailableError, GenerationError):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(HTTPException, _no_route)

    @app.post(CHAT, response_model=None)
    async def chat(request: Request) -> Response:
        return await generations.answer(request, ChatBody, CHAT)

    @app.post(COMPLETIONS, response_model=None)
    async def completions(request: Request) -> Response:
        return await generations.answer(request, CompletionBody, COMPLETIONS)

    @app.get(MODELS, response_model=None)
    async def list_models() -> Response:
        return JSONReply({"object": "list", "data": [await _model_object(models)]})

    @app.get(MODELS + "/{name:path}", response_model=None)
    async def one_model(name: str) -> Response:
        (await models.get()).check_name(name)
        return JSONReply(await _model_object(models))

    app.add_api_route("/health", probes.health, response_model=None)
    app.add_api_route("/ready", probes.ready, response_model=None)
    app.add_api_route("/metrics", probes.metrics, response_model=None)
    return app


async def _model_object(models: ModelSource) -> dict[str, Any]:
    model = await models.get()
    return {
        "id": model.name,
        "object": "model",
        "created": model.description.created,
        "owned_by": "eagle2",
        "max_model_len": model.description.max_model_len,
    }


async def _failed(request: Request, error: Exception) -> Response:
    status, body = describe_failure(error, request.state.request_id)
    return JSONReply({"error": body}, status, failure_headers(error))


async def _gone(_: Request, __: Exception) -> Response:
    # Nobody is there to read it; the server drops it.
    return error_reply(400, "The client left before its request was complete.", code="client_disconnected")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_reply(404, "This path is not served.", code="not_found")
    if error.status_code == 405:
        message = f"The method {request.method} is not served on this path."
        return error_reply(405, message, code="method_not_allowed", headers=error.headers)
    return error_reply(error.status_code, str(error.detail), headers=error.headers)
