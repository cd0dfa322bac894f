"""Reading a request's body: bounded in size and time, then parsed into its schema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from eagle2.errors import RequestError
from eagle2.router.failures import request_error
from eagle2.router.settings import RouterSettings

Schema = TypeVar("Schema", bound=BaseModel)

# Parsing holds the interpreter: 4 MiB of "[[],[],..." for half a second, during which nothing else runs here.
_MOST_VALUES = 150_000

# What is read and thrown away of a body that is too large, so that its sender gets to read the answer.
_DRAIN_BYTES = 64 * 1024 * 1024
_DRAIN_S = 5.0


async def read_body(receive: Receive, headers: Mapping[str, str], settings: RouterSettings) -> bytes:
    """The whole body. Raises RequestError with status 413, 415 or 408, ClientDisconnect when the client leaves."""
    kind = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            "The content type of a request must be application/json.", code="unsupported_media_type", status=415
        )
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestError("Compressed request bodies are not served.", code="unsupported_content_encoding", status=415)
    length = headers.get("content-length", "")
    announced = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
    limit = settings.max_body_bytes
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while more and announced <= limit and len(body) <= limit:
                chunk, more = await _receive(receive)
                body += chunk
    except TimeoutError as error:
        raise RequestError(
            f"The body did not arrive within {settings.body_timeout_s:g} seconds.", code="body_timeout", status=408
        ) from error
    if announced <= limit and len(body) <= limit:
        return bytes(body)
    if more and announced <= _DRAIN_BYTES:
        body.clear()
        await _drain(receive)
    found = f"{announced}" if announced > limit else f"more than {limit}"
    raise RequestError(f"The body has {found} bytes, the most are {limit}.", code="body_too_large", status=413)


async def _receive(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


async def _drain(receive: Receive) -> None:
    size, more = 0, True
    try:
        async with asyncio.timeout(_DRAIN_S):
            while more and size <= _DRAIN_BYTES:
                chunk, more = await _receive(receive)
                size += len(chunk)
    except TimeoutError:
        return


def parse_body(schema: type[Schema], body: bytes) -> Schema:
    """``body`` as ``schema``, of at most 150,000 values. Raises RequestError that names the first field at fault."""
    _refuse_many_values(body)
    try:
        value = json.loads(body.decode())
    except RecursionError:
        raise RequestError("The body is nested too deeply.", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"The body is no JSON: {error.msg} at line {error.lineno}, column {error.colno}.", code="invalid_json"
        ) from error
    except ValueError as error:  # no UTF-8, or a number with thousands of digits
        raise RequestError("The body is no JSON in UTF-8.", code="invalid_json") from error
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise request_error(error) from None  # its message quotes the body
    except RecursionError:
        raise RequestError("The body is nested too deeply.", code="invalid_json") from None


def _refuse_many_values(body: bytes) -> None:
    """Raises RequestError for JSON of too many values, without parsing it."""
    if _marks(body) + body.count(b'"') <= _MOST_VALUES:
        return
    # Prompts have commas, brackets and quotes too: what stands within strings does not count.
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    count = without_escapes.count(b'"') // 2
    if count <= _MOST_VALUES:
        count += _marks(b"".join(without_escapes.split(b'"')[::2]))
    if count > _MOST_VALUES:
        raise RequestError(
            f"The body holds too many values: strings, brackets and commas may be {_MOST_VALUES} together.",
            code="too_many_values",
        )


def _marks(text: bytes) -> int:
    return sum(text.count(mark) for mark in (b",", b"[", b"{"))
