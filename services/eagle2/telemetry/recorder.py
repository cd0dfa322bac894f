"""Counting: a store of values that costs a dictionary access and imports nothing."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from eagle2.telemetry.metrics import Metric

Key = tuple[Metric, tuple[tuple[str, object], ...]]


@dataclass
class _Histogram:
    counts: list[int]
    total: float = 0.0


@dataclass
class Recorder:
    """Values by metric and labels. One thread writes; another may take snapshots."""

    _values: dict[Key, float] = field(default_factory=dict)
    _histograms: dict[Key, _Histogram] = field(default_factory=dict)

    def add(self, metric: Metric, value: float = 1.0, **labels: object) -> None:
        """Add to a counter or a gauge."""
        key = (metric, tuple(sorted(labels.items())))
        self._values[key] = self._values.get(key, 0.0) + value

    def set(self, metric: Metric, value: float, **labels: object) -> None:
        """Set a gauge."""
        self._values[metric, tuple(sorted(labels.items()))] = value

    def get(self, metric: Metric, **labels: object) -> float:
        """The value of a counter or a gauge, 0 where nothing was put in."""
        return self._values.get((metric, tuple(sorted(labels.items()))), 0.0)

    def observe(self, metric: Metric, value: float, **labels: object) -> None:
        """Put one value into a histogram."""
        key = (metric, tuple(sorted(labels.items())))
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = _Histogram([0] * (len(metric.buckets) + 1))
        histogram.counts[bisect_left(metric.buckets, value)] += 1
        histogram.total += value

    def snapshot(self) -> dict[str, float]:
        """All values under their sample names; buckets are cumulative, as Prometheus has them."""
        flat = {metric.sample("", **dict(labels)): value for (metric, labels), value in list(self._values.items())}
        for (metric, labels), histogram in list(self._histograms.items()):
            named = dict(labels)
            running = 0
            for bound, count in zip((*metric.buckets, float("inf")), list(histogram.counts), strict=True):
                running += count
                edge = "+Inf" if bound == float("inf") else repr(bound)
                flat[metric.sample("_bucket", **named, le=edge)] = float(running)
            flat[metric.sample("_count", **named)] = float(running)
            flat[metric.sample("_sum", **named)] = histogram.total
        return flat
