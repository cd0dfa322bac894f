"""Whether the server lives, whether it would answer a chat, and what it has counted."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from eagle2.errors import UnavailableError
from eagle2.router.failures import JSONReply, error_reply
from eagle2.router.model import ModelSource
from eagle2.router.routing import Routing
from eagle2.router.settings import RouterSettings
from eagle2.telemetry import exposition, metrics
from eagle2.telemetry.recorder import Recorder


class Probes:
    """The answers of /health, /ready and /metrics. Every wait for a verifier is bounded."""

    def __init__(self, routing: Routing, models: ModelSource, recorder: Recorder, settings: RouterSettings) -> None:
        self._routing = routing
        self._models = models
        self._recorder = recorder
        self._settings = settings

    async def health(self) -> Response:
        """200 for as long as the event loop turns."""
        return JSONReply({"status": "ok"})

    async def ready(self) -> Response:
        """200 when a chat would be answered, else 503 with a sentence that says what is missing.

        ``degraded`` names what does not work while chats are still answered.
        """
        try:
            async with asyncio.timeout(self._settings.probe_timeout_s):
                model = await self._models.get()
        except TimeoutError:
            return self._not_ready("The verifier has not described its model yet.")
        except UnavailableError as error:
            return self._not_ready(str(error))
        except Exception as error:
            return self._not_ready(f"The verifier's model cannot be used: {type(error).__name__}.")
        replicas = self._routing.fleet.replicas()
        if not replicas:
            return self._not_ready("No verifier is there.")
        # One of several that does not answer is no reason to send clients elsewhere.
        if len(replicas) == 1 and await self._stats() is None:
            return self._not_ready("No verifier answers.")
        degraded = self._routing.degraded()
        return JSONReply({"status": "ready", "model": model.name, **({"degraded": degraded} if degraded else {})})

    async def metrics(self) -> Response:
        """The router's counters and the verifier's, as Prometheus text."""
        stats = await self._stats()
        self._routing.show()
        self._recorder.set(metrics.VERIFIER_UP, 0.0 if stats is None else 1.0)
        text = exposition.render({**self._recorder.snapshot(), **(stats or {})})
        return Response(text, media_type=exposition.CONTENT_TYPE)

    async def _stats(self) -> dict[str, float] | None:
        try:
            async with asyncio.timeout(self._settings.probe_timeout_s):
                return await self._routing.fleet.stats()
        except Exception:
            return None

    def _not_ready(self, sentence: str) -> Response:
        return error_reply(503, sentence, code="not_ready")
