"""Who asks, and under which id. Keys are hashed here and go no further."""

from __future__ import annotations

import re
import secrets

from eagle2.session.hashing import framed_hash

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
ANONYMOUS = "anonymous"


def tenant_of(authorization: str | None) -> str:
    """An opaque tenant from the bearer key of an Authorization header."""
    key = bearer_key(authorization)
    return ANONYMOUS if key is None else framed_hash("tenant", key)


def bearer_key(authorization: str | None) -> str | None:
    """The key of ``Bearer KEY``, None where there is none."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def request_id_of(header: str | None) -> str:
    """The client's own id when it is well-formed (1 to 128 of A-Z a-z 0-9 . _ : -), else a new one."""
    if header is not None and _REQUEST_ID.fullmatch(header):
        return header
    return f"req-{secrets.token_hex(12)}"


def generation_id_of(request_id: str) -> str:
    """Unique also when two clients send the same request id, which must not let them meet in the verifier."""
    return f"{request_id}.{secrets.token_hex(6)}"
