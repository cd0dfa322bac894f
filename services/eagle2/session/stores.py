"""Which store the settings name."""

from __future__ import annotations

from eagle2.config import SessionSettings
from eagle2.session.breaker import GuardedStore
from eagle2.session.memory import MemorySessionStore


def create_store(settings: SessionSettings) -> GuardedStore:
    """The store of ``settings``, guarded. Nothing is connected yet. Raises ``ConfigError`` for a URL without sense."""
    if settings.store.startswith("memory://"):
        return GuardedStore(MemorySessionStore(settings.ttl_s), settings.retry_s)
    # Routers with a store in memory need no client for Redis.
    from eagle2.session.connection import RedisConnection
    from eagle2.session.redis import RedisSessionStore

    connection = RedisConnection(settings.store, timeout_s=settings.timeout_s)
    return GuardedStore(RedisSessionStore(connection, settings.ttl_s), settings.retry_s)
