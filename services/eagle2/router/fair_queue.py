"""Start-time fair queueing: whoever has had the least work is next, and idle time earns no credit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
_MOST_IDLE = 1024


@dataclass
class _Flow(Generic[T]):
    """One tenant. ``start``: the virtual time at which its next item may start. Items: arrival number and work."""

    start: float
    items: dict[T, tuple[int, float]] = field(default_factory=dict)
    work: float = 0.0
    running: int = 0

    def head(self) -> tuple[T, int, float]:
        item, (number, work) = next(iter(self.items.items()))
        return item, number, work


class FairQueue(Generic[T]):
    """Items that wait, by tenant; those of one tenant in the order of their arrival.

    Virtual time is the start of whatever was popped last (Goyal, Vin, Cheng 1996). An item gets its start only when it
    is the next of its tenant, so one that is removed leaves no trace. What it really took is charged at its end.
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        self._flow_of: dict[T, str] = {}
        self._now = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._flow_of)

    @property
    def work(self) -> float:
        """Of everything that waits."""
        return sum(flow.work for flow in self._flows.values())

    def push(self, tenant: str, item: T, work: float) -> None:
        """Let an item wait; ``work`` is above 0."""
        flow = self._flows.setdefault(tenant, _Flow(self._now))
        if not flow.items:
            flow.start = max(flow.start, self._now)
        self._arrivals += 1
        flow.items[item] = (self._arrivals, work)
        flow.work += work
        self._flow_of[item] = tenant

    def peek_work(self) -> float | None:
        """The work of the next item, None when nothing waits."""
        flow = self._next()
        return None if flow is None else flow.head()[2]

    def pop(self) -> T:
        """The next item, which now runs: ``settle`` must follow. Something must wait."""
        flow = self._next()
        assert flow is not None, "nothing waits"
        item, _, work = flow.head()
        self._take(item)
        self._now = max(self._now, flow.start)
        flow.start += work
        flow.running += 1
        if len(self._flows) > _MOST_IDLE:
            # Debts of so many who are not there are not worth their memory.
            self._flows = {name: flow for name, flow in self._flows.items() if flow.items or flow.running}
        return item

    def remove(self, item: T) -> bool:
        """Whether it was waiting."""
        if item not in self._flow_of:
            return False
        self._forget(self._take(item))
        return True

    def settle(self, tenant: str, estimated: float, actual: float) -> None:
        """An item that ran has ended: its tenant is charged what it took instead of what was expected."""
        flow = self._flows[tenant]
        flow.running -= 1
        flow.start = max(self._now, flow.start + actual - estimated)
        if not self._flow_of and not any(other.running for other in self._flows.values()):
            self._flows.clear()  # nobody competes: all begin anew
        else:
            self._forget(tenant)

    def items(self) -> list[T]:
        """Everything that waits."""
        return list(self._flow_of)

    def work_ahead(self, tenant: str) -> float:
        """Work that waits and would start before another item of this tenant."""
        own = self._flows.get(tenant)
        before = own.work if own is not None else 0.0
        start = max(self._now, own.start if own is not None else 0.0) + before
        others = (flow for name, flow in self._flows.items() if name != tenant)
        return before + sum(min(flow.work, max(0.0, start - flow.start)) for flow in others)

    def waiting(self, tenant: str) -> int:
        """How many items of a tenant wait."""
        flow = self._flows.get(tenant)
        return 0 if flow is None else len(flow.items)

    def newest_of_longest(self) -> tuple[str, T] | None:
        """The tenant with the most items and the last of them, None when nothing waits."""
        if not self._flow_of:
            return None
        tenant, flow = max(self._flows.items(), key=lambda named: len(named[1].items))
        return tenant, next(reversed(flow.items))

    def _next(self) -> _Flow[T] | None:
        waiting = [flow for flow in self._flows.values() if flow.items]
        return min(waiting, key=lambda flow: (flow.start, flow.head()[1])) if waiting else None

    def _take(self, item: T) -> str:
        tenant = self._flow_of.pop(item)
        flow = self._flows[tenant]
        _, work = flow.items.pop(item)
        flow.work = flow.work - work if flow.items else 0.0
        return tenant

    def _forget(self, tenant: str) -> None:
        """A tenant that owes nothing is as good as a new one."""
        flow = self._flows[tenant]
        if not flow.items and not flow.running and flow.start <= self._now:
            del self._flows[tenant]
