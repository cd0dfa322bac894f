"""Server-sent events: one ``data:`` line of ASCII JSON, then a blank line."""

from __future__ import annotations

from typing import Any

from eagle2.router.failures import encode_json

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """One event. The JSON is ASCII without line breaks, so no reader can split it (U+2028, U+0085 are escaped)."""
    return b"data: " + encode_json(content) + b"\n\n"
