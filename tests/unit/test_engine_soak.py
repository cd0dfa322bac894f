"""Mixed traffic on an engine that is short of everything: whatever happens around a request, its answer is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.outcome import Outcome, difference
from benchmarks.soak.run import Plan, Report, soak
from benchmarks.soak.traffic import Sizes, traffic
from eagle2.config import Settings, load_settings
from eagle2.engine.pair import Connect
from eagle2.protocol import Commit, Usage
from eagle2.transport.base import ProposerLink
from fakes.checkpoints import golden_head, write_golden_target
from fakes.engines import BOS, request
from fakes.links import DelayedLink, DuplicatingLink, StaleLink

SIZES = Sizes(prompt=48, output=24)


def settings_of(folder: Path, **engine: object) -> Settings:
    """The trained pair of tests/golden, in the default format, with slots for two requests or three; trees whose size
    no clock decides."""
    target = write_golden_target(folder / "target")
    trees = {"tree_budget": "fixed", "depth": 2, "top_k": 8, "num_draft_tokens": 10}
    model = {"target": str(target), "draft": str(golden_head()), "max_model_len": 110}
    return load_settings({"model": model, "engine": {**trees, "kv_slots": 190, "threads": 1, **engine}})


def check(report: Report) -> None:
    assert report.mismatches == []
    assert report.compared == report.requests
    assert not any(report.leaked.values()), report.leaked
    assert report.is_clean
    # That the run was worth its name.
    assert report.counts["preemptions"] > report.requests / 50
    assert report.counts["evicted_tokens"] > 0
    assert report.counts["accepted_tokens"] > report.requests / 4
    assert report.kinds["with_a_cached_prefix"] > report.requests / 20
    assert report.ends["left"] > report.requests / 30
    # A proposer may have been down at one of the two moments: its threads and sockets are few.
    assert report.growth.pop("threads") < 6
    assert report.growth.pop("files") < 6
    # The index of prefixes may have grown by some nodes, never beyond its slots.
    assert all(count < 300 for count in report.growth.values()), report.growth


@pytest.mark.slow
def test_every_answer_is_that_of_a_run_alone_and_of_one_without_speculation(tmp_path: Path) -> None:
    """A proposer serves fifty requests and dies."""
    report = soak(settings_of(tmp_path), Plan(requests=240, seed=1, sizes=SIZES, kill_every=50, in_process=True))
    check(report)
    assert report.counts["pairings"] == report.kills + 1 >= 3


@pytest.mark.slow
def test_replies_that_are_late_and_doubled_change_no_answer(tmp_path: Path) -> None:
    """Links take turns: one that is late, one that says everything twice, one that says old things again."""
    made = 0

    def wrap(connect: Connect) -> Connect:
        def faulty() -> ProposerLink | None:
            nonlocal made
            link = connect()
            if link is None:
                return None
            made += 1
            return (DuplicatingLink, StaleLink, DelayedLink)[made % 3](link)

        return faulty

    plan = Plan(requests=80, seed=2, sizes=SIZES, kill_every=12, in_process=True)
    report = soak(settings_of(tmp_path, draft_timeout_s=0.05), plan, wrap=wrap)
    check(report)
    assert report.counts["stale_replies"] > 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tree_budget", ["fixed", "adaptive"])
def test_two_thousand_requests(tmp_path: Path, tree_budget: str) -> None:
    """With a proposer in a process of its own, killed when it has served 150 requests."""
    plan = Plan(requests=2000, seed=3, sizes=SIZES, kill_every=150)
    report = soak(settings_of(tmp_path, tree_budget=tree_budget), plan, say=print)
    check(report)
    assert report.rss_mib["end"] - report.rss_mib["warm"] < 64


def test_traffic_is_mixed_and_the_same_for_a_seed() -> None:
    asks = traffic(5, 600, lambda text: list(text.encode()), SIZES, bos=BOS)
    assert asks == traffic(5, 600, lambda text: list(text.encode()), SIZES, bos=BOS)
    assert asks != traffic(6, 600, lambda text: list(text.encode()), SIZES, bos=BOS)
    assert all(1 <= len(ask.prompt) <= SIZES.prompt for ask in asks)
    assert all(1 <= ask.stop.max_tokens <= SIZES.output for ask in asks)
    assert 40 <= sum(ask.patience is not None for ask in asks) <= 80
    assert 5 <= sum(ask.deadline_s is not None for ask in asks) <= 40
    assert len({ask.tenant for ask in asks}) == len({ask.priority for ask in asks}) == 2
    assert all(ask.continues is None or ask.continues < ask.number for ask in asks)
    for trait in ("top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias"):
        assert sum(bool(getattr(ask.sampling, trait)) for ask in asks) > 20, trait
    for condition in ("stop_strings", "stop_token_ids", "ignore_eos"):
        assert sum(bool(getattr(ask.stop, condition)) for ask in asks) > 20, condition


def outcome(ids: list[int], finish_reason: str | None = "stop", **changes: object) -> Outcome:
    usage = Usage(prompt_tokens=1, completion_tokens=len(ids))
    values = {"text": bytes(ids).decode(), "finish_reason": finish_reason, "usage": usage, **changes}
    return Outcome(0, request("a", deadline=None), tuple(ids), **values)  # type: ignore[arg-type]


def test_a_difference_is_found_and_a_beginning_is_none() -> None:
    """What compares two thousand answers can itself say no."""
    whole = outcome([97, 98, 99])
    assert difference(whole, outcome([97, 98, 99])) is None
    assert difference(outcome([97, 98], None, left=True), whole) is None
    assert difference(outcome([], None, left=True), whole) is None
    late = outcome([97], "error", error="The deadline passed after 1 tokens.")
    assert "error" in (difference(late, whole) or ""), "it had no deadline"
    late.request = request("a", deadline=1.0)
    assert difference(late, whole) is None
    for wrong in (
        outcome([97, 100, 99]),
        outcome([97, 98]),
        outcome([97, 98, 99, 100]),
        outcome([97, 98, 99], "length"),
        outcome([97, 98, 99], text="ab"),
        outcome([97, 98, 99], usage=Usage(1, 4)),
        outcome([97, 98], None),
        outcome([98], None, left=True),
        outcome([97, 98], None, left=True, text="abx"),
        outcome([97], "error", error="The engine has stopped."),
    ):
        assert difference(wrong, whole) is not None, wrong
    assert difference(whole, outcome([97, 98, 99], "error")) is not None


def test_an_item_behind_the_end_is_an_error() -> None:
    ended = outcome([97])
    with pytest.raises(AssertionError, match="after its end"):
        ended.add(Commit((98,), "b"))
