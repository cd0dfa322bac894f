"""Names that may be stored and logged in the place of what clients sent."""

from __future__ import annotations

import hashlib


def framed_hash(*parts: str) -> str:
    """SHA-256 over the parts, each with its length before it, so that ("ab", "c") is not ("a", "bc")."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()
