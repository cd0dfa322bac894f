"""Replicas that have just failed, and when they may be tried again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from eagle2.protocol import Replica

_REMEMBERED = 1024


@dataclass(slots=True)
class _Failures:
    count: int
    until: float


class Cooldown:
    """Keeps requests away from a replica for a while after it failed.

    The first failure costs ``first_s`` seconds, each further one of the same incarnation twice as much as the last, at
    most ``longest_s``. Failures that are noticed while it is kept away already are one failure: a whole batch
    sees the same death. Another incarnation under the same uid has a clean slate. ``clock`` is monotonic.
    """

    def __init__(self, *, clock: Callable[[], float], first_s: float = 5.0, longest_s: float = 60.0) -> None:
        self._clock, self._first_s, self._longest_s = clock, first_s, longest_s
        self._failures: OrderedDict[str, _Failures] = OrderedDict()

    def failed(self, replica: Replica) -> None:
        """A request has failed there."""
        now = self._clock()
        before = self._failures.get(replica.incarnation)
        if before is not None and now < before.until:
            return
        count = 0 if before is None else before.count
        lasts_s = min(self._longest_s, self._first_s * 2 ** min(count, 30))
        self._failures[replica.incarnation] = _Failures(count + 1, now + lasts_s)
        self._failures.move_to_end(replica.incarnation)
        if len(self._failures) > _REMEMBERED:
            self._failures.popitem(last=False)

    def worked(self, replica: Replica) -> None:
        """It has finished a request: what was before is forgotten."""
        self._failures.pop(replica.incarnation, None)

    def keeps_away(self, replica: Replica) -> bool:
        """Whether nothing is sent there now."""
        failures = self._failures.get(replica.incarnation)
        return failures is not None and self._clock() < failures.until
