"""What surrounds every request: its id, its key, its count, and a last answer where code failed."""

from __future__ import annotations

import logging
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle2.router.failures import JSONReply, describe_failure, error_reply
from eagle2.router.identity import bearer_key, request_id_of
from eagle2.router.tenants import KeyFile, unchecked_caller
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

_LOG = logging.getLogger(__name__)
_CLIENT_CLOSED = 499  # nothing was sent: the client had left
_OPEN = frozenset({"/health", "/ready"})  # what probes ask, without a key


class RequestGate:
    """ASGI middleware: the scope's state gets ``request_id``, ``caller`` and ``reply_headers``.

    X-Request-Id, X-Eagle2-Router (which is ``router``) and whatever stands in ``reply_headers`` go onto the response.
    With ``keys``, who brings none of them is answered 401 here, before any route is looked for and any byte of the body
    is read.
    """

    def __init__(
        self,
        app: ASGIApp,
        recorder: Recorder,
        endpoints: frozenset[str],
        keys: KeyFile | None = None,
        *,
        router: str,
    ) -> None:
        self._app = app
        self._recorder = recorder
        self._endpoints = endpoints
        self._keys = keys
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(_header(scope, b"x-request-id"))
        reply_headers: dict[str, str] = {}
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, reply_headers=reply_headers)
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = {**reply_headers, "x-request-id": request_id, "x-eagle2-router": self._router}
                headers = [(name.encode("ascii"), value.encode("ascii")) for name, value in added.items()]
                message = {**message, "headers": [*message.get("headers", []), *headers]}
            await send(message)

        try:
            authorization = _header(scope, b"authorization")
            caller = await self._keys.caller(authorization) if self._keys else unchecked_caller(authorization)
            if caller is None and scope["path"] not in _OPEN:
                await _refusal(authorization)(scope, receive, tagged)
                return
            state["caller"] = caller
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


def _refusal(authorization: str | None) -> JSONReply:
    if bearer_key(authorization) is None:
        sentence = "An API key is needed: send it as 'Authorization: Bearer KEY'."
        return error_reply(401, sentence, code="missing_api_key", headers={"WWW-Authenticate": 'Bearer realm="eagle2"'})
    challenge = 'Bearer realm="eagle2", error="invalid_token"'
    sentence = "The API key of this request is not known here."
    return error_reply(401, sentence, code="invalid_api_key", headers={"WWW-Authenticate": challenge})


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None
