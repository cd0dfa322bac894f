"""A session store that cannot be used."""

from __future__ import annotations

from typing import Any

from eagle2.session.store import StoreError


class DownStore:
    """Implements ``eagle2.session.store.SessionStore``: every operation fails at once."""

    def __init__(self) -> None:
        self.asked = 0

    async def _fail(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        raise StoreError("The session store does not answer.")

    lookup = claim = hold = report = sessions = session = move = drop = ping = _fail

    async def close(self) -> None:
        return None
