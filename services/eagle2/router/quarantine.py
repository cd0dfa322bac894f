"""Requests that crash verifiers are refused for a while."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from eagle2.errors import RequestError
from eagle2.protocol import GenerationRequest

_REMEMBERED = 4096


def fingerprint_of(request: GenerationRequest) -> str:
    """The same for whatever makes a verifier do the same work: tenant, prompt and parameters.

    Not the seed: it is drawn anew where the client names none.
    """
    asked = (
        request.tenant,
        request.prompt_ids,
        replace(request.sampling, seed=0),
        request.stop,
        request.speculation,
    )
    return hashlib.sha256(repr(asked).encode()).hexdigest()


class Quarantine:
    """Fingerprints that are refused for ``lasts_s`` seconds; the newest few thousand. ``clock`` is monotonic."""

    def __init__(self, lasts_s: float, *, clock: Callable[[], float]) -> None:
        self._lasts_s, self._clock = lasts_s, clock
        self._until: OrderedDict[str, float] = OrderedDict()

    def put(self, request: GenerationRequest) -> RequestError:
        """Refuse the like of it from now on. Returns the error for its own client."""
        fingerprint = fingerprint_of(request)
        self._until[fingerprint] = self._clock() + self._lasts_s
        self._until.move_to_end(fingerprint)
        if len(self._until) > _REMEMBERED:
            self._until.popitem(last=False)
        return self._error(self._lasts_s)

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError with the code ``request_quarantined`` while the like of it is refused."""
        if not self._until:
            return
        fingerprint = fingerprint_of(request)
        until = self._until.get(fingerprint)
        if until is None:
            return
        left = until - self._clock()
        if left > 0:
            raise self._error(left)
        del self._until[fingerprint]

    @staticmethod
    def _error(left_s: float) -> RequestError:
        return RequestError(
            "Verifiers have crashed while they worked on this request; it and its like are refused "
            f"for {max(1, round(left_s))} seconds.",
            code="request_quarantined",
        )
