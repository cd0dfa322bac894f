"""What the engine counts; a snapshot can be taken from any thread."""

from __future__ import annotations

from collections import defaultdict

from eagle2.telemetry.metrics import Metric


class Stats:
    """Counters and gauges by declared metric. Written by the engine thread only."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)

    def add(self, metric: Metric, amount: float = 1.0, **labels: object) -> None:
        self._values[metric.sample("", **labels)] += amount

    def set(self, metric: Metric, value: float, **labels: object) -> None:
        self._values[metric.sample("", **labels)] = value

    def get(self, metric: Metric, **labels: object) -> float:
        return self._values.get(metric.sample("", **labels), 0.0)

    def snapshot(self) -> dict[str, float]:
        return dict(self._values)
