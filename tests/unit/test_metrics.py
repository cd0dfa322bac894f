"""Declarations, counting and rendering of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from eagle2.telemetry import metrics
from eagle2.telemetry.exposition import parse_sample, render
from eagle2.telemetry.metrics import METRICS, Metric
from eagle2.telemetry.recorder import Recorder


def test_declarations_are_sound() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert metric.help.endswith(".")


def test_every_declared_metric_is_in_a_group() -> None:
    declared = {value for value in vars(metrics).values() if isinstance(value, Metric)}
    assert declared == set(METRICS)


@given(st.text(max_size=20), st.text(max_size=20))
def test_sample_names_come_back(first: str, second: str) -> None:
    metric = Metric("m_total", "counter", "Help.", ("a", "b"))
    assert parse_sample(metric.sample(a=first, b=second)) == ("m_total", {"a": first, "b": second})


@pytest.mark.parametrize("key", ["", "a b", "a{", "a{b}", 'a{b="c}', 'a{b="c"x}'])
def test_malformed_names_are_refused(key: str) -> None:
    with pytest.raises(ValueError):
        parse_sample(key)


def test_rendering_reads_back() -> None:
    recorder = Recorder()
    recorder.add(metrics.REQUESTS, endpoint="/v1/completions", status=200)
    recorder.add(metrics.REQUESTS, 2, endpoint="/v1/completions", status=200)
    recorder.set(metrics.KV_SLOTS_USED, 7, side="draft")
    recorder.set(metrics.KV_SLOTS_USED, 5, side="draft")
    for value in (0.005, 0.01, 0.3, 1e9):
        recorder.observe(metrics.TIME_TO_FIRST_TOKEN, value, endpoint="e")
    verifier = {"proposer_up": 1.0, metrics.NUM_ACCEPTED_TOKENS_PER_POS.sample(pos=1): 9.0, "novelty": 4.0}
    text = render({**recorder.snapshot(), **verifier}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families.values() for s in f.samples}
    labels = (("endpoint", "/v1/completions"), ("status", "200"))
    assert values["eagle2_requests_total", labels] == 3
    assert values["eagle2_kv_slots_used", (("side", "draft"),)] == 5
    assert values["eagle2_proposer_up", ()] == 1
    assert values["eagle2_spec_decode_num_accepted_tokens_per_pos_total", (("pos", "1"),)] == 9
    assert values["eagle2_novelty", ()] == 4
    bucket = "eagle2_time_to_first_token_seconds_bucket"
    buckets = {dict(key)["le"]: value for (name, key), value in values.items() if name == bucket}
    assert (buckets["0.01"], buckets["0.25"], buckets["0.5"], buckets["150.0"], buckets["+Inf"]) == (2, 2, 3, 3, 4)
    assert values["eagle2_time_to_first_token_seconds_count", (("endpoint", "e"),)] == 4
    assert families["eagle2_time_to_first_token_seconds"].type == "histogram"
    assert families["eagle2_requests"].type == "counter"
    assert "eagle2_num_requests_running" not in text  # nothing measured, nothing shown


def test_labels_must_be_the_declared_ones() -> None:
    with pytest.raises(AssertionError):
        metrics.REQUESTS.sample(endpoint="x")
    with pytest.raises(AssertionError):
        metrics.PROPOSER_UP.sample(side="x")


def test_the_reference_names_every_metric() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    expected = [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels) or 'none'} | {m.help} |"
        for m in METRICS
    ]
    assert rows == expected
