"""The kill test in small: two pairs, two routers and a Redis, of each kind of process one dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kills.run import Plan, run_kills
from fakes.redis_server import require_binary

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly]

_KINDS = ("verifier", "redis", "router", "proposer")


@pytest.mark.timeout(900)  # every wait in it has a bound of its own
def test_no_stream_is_lost_or_changed_by_the_death_of_a_process(tmp_path: Path) -> None:
    require_binary()
    plan = Plan(pairs=2, streams=8, kills=len(_KINDS), kinds=_KINDS, conversations=6, tokens=(50, 150))
    report = run_kills(plan, tmp_path)
    assert report.problems == []
    assert report.kills == dict.fromkeys(_KINDS, 1)
    assert report.streams["equal"] > plan.streams
    assert report.moves.get("crash", 0) > 0, "streams were on the verifier that was killed"
