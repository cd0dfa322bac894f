"""API keys from a mounted file: who asks, of which tenant, with which limits."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle2.config import TenantSettings
from eagle2.errors import ConfigError
from eagle2.router.identity import bearer_key, tenant_of
from eagle2.session.hashing import framed_hash

_LOG = logging.getLogger(__name__)
_TENANT = re.compile(r"[A-Za-z0-9._:@-]{1,128}", re.ASCII)
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})", re.ASCII)
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_MOST_BYTES = 1024 * 1024
_READ_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. ``tenant`` and ``key`` are hashes; None is no limit."""

    tenant: str
    key: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    caller: Caller


def unchecked_caller(authorization: str | None) -> Caller:
    """Who asks where no keys are set: everybody is served, and every bearer key is a tenant of its own."""
    tenant = tenant_of(authorization)
    return Caller(tenant, tenant)


def new_key() -> str:
    """A key of 256 random bits. Only its SHA-256 is kept, which needs no salt for a key that nobody can guess."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_line(tenant: str, key: str) -> str:
    """The line of ``key`` for the key file. Raises ``ConfigError`` for a name that cannot stand there."""
    _check_tenant(tenant)
    return f"{tenant} sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def parse_keys(
    text: str, requests_per_minute: int | None = None, tokens_per_minute: int | None = None
) -> tuple[_Entry, ...]:
    """The entries of a key file; the limits hold where a line has none of its own.

    A line is ``TENANT sha256:HEX [requests_per_minute=N] [tokens_per_minute=N]``; empty lines and those that begin
    with # are skipped. Raises ``ConfigError`` that names the line and quotes nothing of it, since a key may stand
    there by mistake.
    """
    entries: dict[bytes, _Entry] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            entry = _parse_line(words, requests_per_minute, tokens_per_minute)
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from None
        if entry.digest in entries:
            raise ConfigError(f"line {number}: the same key stands further up.")
        entries[entry.digest] = entry
    if not entries:
        raise ConfigError("there is no key in it, so nobody could ask.")
    return tuple(entries.values())


def _parse_line(words: list[str], requests: int | None, tokens: int | None) -> _Entry:
    tenant, *rest = words
    _check_tenant(tenant)
    match = _DIGEST.fullmatch(rest[0]) if rest else None
    if match is None:
        raise ConfigError("behind the tenant must stand 'sha256:' and 64 hexadecimal digits, never the key itself.")
    limits = {"requests_per_minute": requests, "tokens_per_minute": tokens}
    for word in rest[1:]:
        name, _, value = word.partition("=")
        if name not in _LIMITS:
            raise ConfigError(f"behind the hash only {' and '.join(f'{known}=N' for known in _LIMITS)} are known.")
        if not (value.isascii() and value.isdigit() and len(value) < 16 and int(value) > 0):
            raise ConfigError(f"{name} must be a whole number from 1 on.")
        limits[name] = int(value)
    digest = bytes.fromhex(match[1])
    caller = Caller(framed_hash("tenant name", tenant), framed_hash("key", digest.hex()), **limits)
    return _Entry(digest, caller)


def _check_tenant(tenant: str) -> None:
    if not _TENANT.fullmatch(tenant):
        raise ConfigError("a tenant's name must be 1 to 128 of the characters A-Z a-z 0-9 . _ : @ and -.")


class KeyFile:
    """The keys of one file, read again when it changes.

    It is looked at by requests, at most once in ``check_s``, in a thread: a mounted secret is replaced by swapping a
    symbolic link, which no watch on the file would see. A new file that cannot be used is logged once and the last
    good one goes on. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        check_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``ConfigError`` for a file that cannot be read, has a bad line, or has no key."""
        self._path = Path(path)
        self._limits = (requests_per_minute, tokens_per_minute)
        self._check_s = check_s
        self._clock = clock
        self._checked = clock()
        self._lock = asyncio.Lock()
        self._seen: bytes | None = None
        try:
            self._seen = self._read()
            self._entries = self._parse(self._seen)
        except ConfigError as error:
            raise ConfigError(f"The key file {self._path} cannot be used: {error}") from None

    @classmethod
    def of(cls, settings: TenantSettings) -> KeyFile | None:
        """The key file that the operator names, if one is. Raises as the constructor does."""
        if settings.keys_file is None:
            return None
        return cls(
            settings.keys_file,
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
        )

    @property
    def callers(self) -> tuple[Caller, ...]:
        """Whose keys are known, one for each key."""
        return tuple(entry.caller for entry in self._entries)

    async def caller(self, authorization: str | None) -> Caller | None:
        """Whose key stands in an Authorization header, None when nobody's does."""
        key = bearer_key(authorization)
        if key is None:
            return None
        if self._clock() - self._checked >= self._check_s:
            await self._refresh()
        return self._find(key)

    def _find(self, key: str) -> Caller | None:
        # Headers are bytes that were read as Latin-1.
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        found = None
        for entry in self._entries:  # all of them, so that the time does not tell which one it was
            if hmac.compare_digest(entry.digest, digest):
                found = entry.caller
        return found

    async def _refresh(self) -> None:
        async with self._lock:
            if self._clock() - self._checked < self._check_s:
                return
            self._checked = self._clock()
            try:
                async with asyncio.timeout(_READ_TIMEOUT_S):
                    await asyncio.to_thread(self._reload)
            except TimeoutError:
                _LOG.error("The key file %s could not be read in time; the keys stay as they were.", self._path)

    def _reload(self) -> None:
        raw: bytes | None = None
        try:
            raw = self._read()
            if raw == self._seen:
                return
            self._entries = self._parse(raw)
            _LOG.warning("The key file %s has changed: known keys: %d.", self._path, len(self._entries))
        except ConfigError as error:
            if raw is not None or self._seen is not None:
                _LOG.error("The key file %s cannot be used, its last good version goes on: %s", self._path, error)
        self._seen = raw

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"it cannot be read ({error.strerror}).") from None
        if len(raw) > _MOST_BYTES:
            raise ConfigError(f"it has more than {_MOST_BYTES} bytes.")
        return raw

    def _parse(self, raw: bytes) -> tuple[_Entry, ...]:
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise ConfigError("it is no text in UTF-8.") from None
        return parse_keys(text, *self._limits)
