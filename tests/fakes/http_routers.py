"""Routers with their HTTP API over one fleet, and the clients that ask them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from eagle2.config import AdmissionSettings, RoutingSettings
from eagle2.router.api import create_app
from eagle2.router.settings import RouterSettings
from eagle2.session.breaker import GuardedStore
from eagle2.session.session import HEADER
from fakes.fleet import FakeFleet, fleet_request, undisturbed
from fakes.server import serving_here

PATH = "/v1/completions"
Prompt = tuple[int, ...]


@dataclass
class HttpRouters:
    """Routers over one fleet, by their clients."""

    fleet: FakeFleet
    clients: list[httpx.AsyncClient]

    async def ask(self, router: int, prompt: Prompt, session: str | None = None, **fields: Any) -> httpx.Response:
        headers = {} if session is None else {HEADER: session}
        body = {"prompt": list(prompt), "seed": 3, "max_tokens": 24, "return_token_ids": True, **fields}
        return await self.clients[router].post(PATH, json=body, headers=headers)


@asynccontextmanager
async def two_clients(
    fleet: FakeFleet, store: Callable[[], GuardedStore], routing: RoutingSettings, *, sockets: bool = False
) -> AsyncIterator[list[httpx.AsyncClient]]:
    """One of each of two routers, "a" and "b". store: makes each router its own, which its app closes. sockets: behind
    real connections, so that clients can leave."""
    async with AsyncExitStack() as stack:
        clients = []
        for name in ("a", "b"):
            app = create_app(
                fleet, RouterSettings(), store=store(), router=name, routing=routing, admission=AdmissionSettings()
            )
            transport = None
            if sockets:
                url = await stack.enter_async_context(serving_here(app))
            else:
                await stack.enter_async_context(app.router.lifespan_context(app))
                url, transport = "http://router", httpx.ASGITransport(app)
            limits = httpx.Limits(max_connections=400)
            client = httpx.AsyncClient(base_url=url, transport=transport, timeout=60, limits=limits)
            clients.append(await stack.enter_async_context(client))
        yield clients


def right(prompt: Prompt, answer: httpx.Response) -> bool:
    """Whether this is the whole undisturbed answer."""
    assert answer.status_code == 200, answer.text
    ids, text, reason = undisturbed(fleet_request("x", prompt, seed=3))
    choice = answer.json()["choices"][0]
    return (choice["token_ids"], choice["text"], choice["finish_reason"]) == (ids, text, reason)
