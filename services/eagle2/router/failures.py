"""Errors as clients of the OpenAI API expect them: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from eagle2.errors import OverloadedError, RequestError, UnavailableError
from eagle2.protocol import ErrorCode

_LONGEST_NAME = 64
_STATUS_OF: dict[ErrorCode, int] = {
    "generation_failed": 500,
    "deadline_exceeded": 504,
    "verifier_failed": 503,
    "verifier_stopped": 503,
}


class GenerationError(Exception):
    """A generation that began and cannot go on. The message is fit for the client."""

    def __init__(self, message: str, code: ErrorCode = "generation_failed") -> None:
        super().__init__(message)
        self.code = code


class JSONReply(Response):
    """JSON in plain ASCII: every separator that a client might split lines at is escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def encode_json(content: Any) -> bytes:
    """``content`` as compact ASCII. Lone surrogates stay escaped; NaN is a bug."""
    return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def error_object(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The value of ``error``. ``status`` decides whose fault it is."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def error_reply(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONReply:
    """A whole response for an error."""
    return JSONReply({"error": error_object(status, message, param=param, code=code)}, status, dict(headers or {}))


def describe_failure(error: Exception, request_id: str) -> tuple[int, dict[str, Any]]:
    """Status and error object of an exception. Nothing of an unexpected one reaches the client."""
    if isinstance(error, RequestError):
        return error.status, error_object(error.status, error.message, param=error.param, code=error.code)
    if isinstance(error, UnavailableError):
        message = str(error) or "No verifier can take the request now."
        return 503, error_object(503, message, code="unavailable")
    if isinstance(error, GenerationError):
        status = _STATUS_OF[error.code]
        return status, error_object(status, str(error), code=error.code)
    message = f"The server failed to answer; its log names the reason under {request_id}."
    return 500, error_object(500, message, code="internal_error")


def failure_headers(error: Exception) -> dict[str, str]:
    """Headers that go with an exception's reply: when to come back, and what a limit leaves until then."""
    if not isinstance(error, OverloadedError):
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s))), **getattr(error, "headers", {})}


def request_error(error: ValidationError) -> RequestError:
    """The first fault of a body as a sentence that names its field. Values of text never come back."""
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    kind = first["type"]
    if kind == "extra_forbidden":
        return RequestError(f"{param}: this field is unknown.", param=param, code="unknown_parameter")
    if kind == "missing":
        return RequestError(f"{param}: this field is required.", param=param, code="missing_required_parameter")
    value = first["input"]
    shown = f", not {value!r}" if type(value) in (int, float, bool) and len(repr(value)) <= 32 else ""
    message = f"{param}: {first['msg']}{shown}." if param else f"{first['msg']}{shown}."
    if kind in ("unsupported", "unsupported_content"):
        return RequestError(message, param=param, code="unsupported_value")
    return RequestError(message, param=param, code="invalid_type" if kind.endswith("_type") else "invalid_value")


def _path(location: tuple[int | str, ...]) -> str | None:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f"{'.' if path else ''}{part[:_LONGEST_NAME]}"
    return path or None
