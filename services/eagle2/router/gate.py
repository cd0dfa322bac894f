"""What surrounds every request: its id, its count, and a last answer where code failed."""

from __future__ import annotations

import logging
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle2.router.failures import JSONReply, describe_failure
from eagle2.router.identity import request_id_of
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

_LOG = logging.getLogger(__name__)
_CLIENT_CLOSED = 499  # nothing was sent: the client had left


class RequestGate:
    """ASGI middleware. Puts ``request_id`` into the scope's state and X-Request-Id onto the response."""

    def __init__(self, app: ASGIApp, recorder: Recorder, endpoints: frozenset[str]) -> None:
        self._app = app
        self._recorder = recorder
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(_header(scope, b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", []), (b"x-request-id", request_id.encode("ascii"))]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except Exception as error:
            # An exception's message may quote the request; its type and its lines of code do not.
            trace = "".join(traceback.format_tb(error.__traceback__))
            _LOG.error("request %s failed: %s\n%s", request_id, type(error).__name__, trace)
            if status:
                return  # the server closes the connection: the response is visibly incomplete
            code, body = describe_failure(error, request_id)
            await JSONReply({"error": body}, code)(scope, receive, tagged)
        finally:
            path = scope["path"] if scope["path"] in self._endpoints else "other"
            self._recorder.add(metrics.REQUESTS, endpoint=path, status=status or _CLIENT_CLOSED)


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None
