"""What a conversation is called, and the fingerprints by which prompts that begin alike know each other."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from eagle2.errors import RequestError
from eagle2.session.hashing import framed_hash

HEADER = "X-Session-Id"
MAX_NAME_LENGTH = 512  # of names in a body too (router/schemas.py)
BLOCK_TOKENS = 64
MAX_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. ``name`` is a hash, 64 hexadecimal digits.

    ``is_opening``: the client gave no name and this is the first turn. Many conversations begin with the same words, so
    such a request goes where there is room, not to the owner of the name; whoever takes it owns the name afterwards.
    """

    name: str
    is_opening: bool = False


def session_of(
    tenant: str,
    *,
    header: str | None = None,
    session_id: str | None = None,
    prompt_cache_key: str | None = None,
    user: str | None = None,
    messages: Sequence[tuple[str, str]] = (),
) -> Session | None:
    """The session of a request: named by its client, else by how the conversation begins; None for a lone prompt.

    header: of ``X-Session-Id``; the next three: fields of the body. A blank one counts as none, and the first that
    is there decides. messages: (role, text) of a chat. Names of different tenants never meet. Raises ``RequestError``
    for a header of more than 512 characters.
    """
    if header is not None and len(header) > MAX_NAME_LENGTH:
        raise RequestError(
            f"{HEADER} has {len(header)} characters, the most are {MAX_NAME_LENGTH}.",
            param=HEADER,
            code="session_id_too_long",
        )
    for kind, value in (
        ("id", header),
        ("id", session_id),
        ("prompt_cache_key", prompt_cache_key),
        ("user", user),
    ):
        if value is not None and value.strip():
            return Session(framed_hash("session", tenant, kind, value.strip()))
    return _by_start(tenant, messages)


def _by_start(tenant: str, messages: Sequence[tuple[str, str]]) -> Session | None:
    """Everything before the first answer is what all turns of a chat have in common."""
    start = list(takewhile(lambda message: message[0] != "assistant", messages))
    # A chat that begins with an answer, or has none but instructions, is too common to be one conversation.
    if not any(role == "user" for role, _ in start):
        return None
    parts = [part for message in start for part in message]
    return Session(framed_hash("session", tenant, "start", *parts), is_opening=len(start) == len(messages))


def prefix_fingerprints(tenant: str, prompt: Sequence[int]) -> tuple[str, ...]:
    """One fingerprint for every 64 tokens of ``prompt``, from the shortest prefix to the longest, 32 at most.

    Each covers everything before it, the tenant first: two prompts share their first n fingerprints exactly if they are
    of one tenant and begin with the same 64 n tokens. 32 hexadecimal digits each.
    """
    fingerprints = []
    digest = hashlib.sha256(framed_hash("prefix", tenant).encode())
    for end in range(BLOCK_TOKENS, min(len(prompt), BLOCK_TOKENS * MAX_BLOCKS) + 1, BLOCK_TOKENS):
        block = array("q", prompt[end - BLOCK_TOKENS : end])
        if sys.byteorder == "big":  # routers on machines of both kinds share one store
            block.byteswap()
        digest.update(block)
        fingerprints.append(digest.hexdigest()[:32])
    return tuple(fingerprints)
