"""How many retries a router may send: what fails everywhere must not be multiplied."""

from __future__ import annotations


class RetryBudget:
    """A token bucket that requests fill and retries empty.

    Retries are at most ``share`` of the requests in the long run, and ``burst`` on top: a replica that dies with a full
    batch is one burst. Not thread-safe; one event loop uses it.
    """

    def __init__(self, share: float, burst: int) -> None:
        self._share = share
        self._burst = float(burst)
        self._left = self._burst

    @property
    def left(self) -> float:
        """Retries that would be granted now."""
        return self._left

    def requested(self) -> None:
        """A new request has come in."""
        self._left = min(self._burst, self._left + self._share)

    def take(self) -> bool:
        """Whether a retry may be sent now; if so, it is counted."""
        # What shares such as 0.1 add up to lies a rounding below the whole number.
        if self._left < 1 - 1e-9:
            return False
        self._left = max(0.0, self._left - 1)
        return True
