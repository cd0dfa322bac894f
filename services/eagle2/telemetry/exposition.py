"""Snapshots as Prometheus text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from eagle2.telemetry.metrics import METRICS, NAMESPACE, Metric

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SAMPLE = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)(?:\{(.*)\})?", re.DOTALL)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)', re.DOTALL)
_ESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_SUFFIXES = ("_bucket", "_count", "_sum")


def parse_sample(key: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a snapshot's key. Raises ValueError for a key of another form."""
    match = _SAMPLE.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is no sample name.")
    name, inner = match.group(1), match.group(2) or ""
    labels: dict[str, str] = {}
    position = 0
    while position < len(inner):
        pair = _LABEL.match(inner, position)
        if pair is None:
            raise ValueError(f"The labels of {key!r} are malformed.")
        labels[pair.group(1)] = re.sub(r"\\.", lambda found: _ESCAPED.get(found.group(), found.group()), pair.group(2))
        position = pair.end()
    return name, labels


def render(snapshot: Mapping[str, float], declared: Iterable[Metric] = METRICS) -> bytes:
    """``snapshot`` in the Prometheus text format, families in the order of their declaration.

    A name that is not declared is shown as untyped rather than hidden. Raises ValueError for a malformed key.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import Metric as Family

    families: dict[str, Family] = {}
    for metric in declared:
        # The library puts a counter's _total behind the family name by itself.
        family = Family(f"{NAMESPACE}_{metric.name.removesuffix('_total')}", metric.help, metric.kind)
        for name in [metric.name + suffix for suffix in _SUFFIXES] if metric.kind == "histogram" else [metric.name]:
            families[name] = family
    for key, value in snapshot.items():
        name, labels = parse_sample(key)
        if name not in families:
            families[name] = Family(f"{NAMESPACE}_{name}", "Not declared.", "untyped")
        families[name].add_sample(f"{NAMESPACE}_{name}", labels, value)
    registry = CollectorRegistry()
    registry.register(_Collected(families.values()))
    return generate_latest(registry)


class _Collected:
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list({id(family): family for family in families if family.samples}.values())

    def collect(self) -> Iterable[Family]:
        return self._families
