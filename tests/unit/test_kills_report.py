"""What the kill test counts against the service, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.kills.clients import Stream
from benchmarks.kills.report import Kill, Report, judge

_ANSWER = Stream(
    "quiet",
    (0, 0),
    opened=0.0,
    ended=4.0,
    router="r1",
    times=[1.0, 2.0, 4.0],
    token_ids=[5, 6, 7],
    text="abc",
    finish_reason="length",
    usage=(2, 3),
    end="finished",
)
_CUT = replace(_ANSWER, token_ids=[5, 6], times=[1.0, 2.0], text="ab", finish_reason=None, usage=None, end="broken")
_ROUTER_DIED = Kill("router", "r1", at=3.0, recovered=6.0)


def _judged(stream: Stream, *kills: Kill, moves: dict[str, list[tuple[str, str]]] | None = None) -> Report:
    return judge([replace(stream, name="s")], {(0, 0): _ANSWER}, kills, moves or {}, [])


def test_an_answer_as_in_quiet_is_fine() -> None:
    report = _judged(_ANSWER, Kill("verifier", "v1", at=2.5, recovered=9.0))
    assert report.is_clean
    assert report.streams == {"all": 1, "equal": 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda s: replace(s, token_ids=[5, 6, 6, 7]),
        lambda s: replace(s, token_ids=[5, 7, 6]),
        lambda s: replace(s, text="ab"),
        lambda s: replace(s, finish_reason="stop"),
        lambda s: replace(s, usage=(2, 4)),
    ],
)
def test_any_difference_counts_even_when_the_router_died_meanwhile(change: Callable[[Stream], Stream]) -> None:
    report = _judged(change(_ANSWER), _ROUTER_DIED)
    assert not report.is_clean
    assert report.streams["different"] == 1


def test_only_the_death_of_its_own_router_excuses_a_stream_that_breaks_off() -> None:
    assert _judged(_CUT, _ROUTER_DIED).streams == {"all": 1, "own router killed": 1}
    assert _judged(_CUT, _ROUTER_DIED).is_clean
    for kill in (replace(_ROUTER_DIED, uid="r2"), replace(_ROUTER_DIED, kind="verifier")):
        report = _judged(_CUT, kill)
        assert not report.is_clean
        assert report.streams["lost: no end"] == 1
    wrong = replace(_CUT, token_ids=[5, 7])
    assert _judged(wrong, _ROUTER_DIED).streams["different"] == 1


def test_an_error_or_a_refusal_by_a_router_that_lives_is_a_loss() -> None:
    for end, fate in (("error", "lost: error event"), ("refused", "lost: refused")):
        report = _judged(replace(_CUT, end=end), replace(_ROUTER_DIED, uid="r2"))
        assert not report.is_clean
        assert report.streams[fate] == 1


def test_what_the_proxy_says_for_a_dead_router_is_counted_apart_only_around_its_death() -> None:
    nobody = replace(_CUT, router=None, token_ids=[], times=[], text="", end="refused", opened=2.0, ended=3.5)
    assert _judged(nobody, _ROUTER_DIED).streams["own router killed before an answer began"] == 1
    assert not _judged(replace(nobody, ended=2.5), _ROUTER_DIED).is_clean
    assert not _judged(nobody).is_clean


def test_gaps_around_a_kill_are_those_of_streams_that_moved_or_of_those_beside_them() -> None:
    kill = Kill("verifier", "v1", at=2.5, recovered=3.0)
    beside = _judged(_ANSWER, kill, moves={"s": [("v2", "crash")], "another": [("v1", "crash")]})
    assert beside.stalls["beside"]["most"] == 2.0
    assert beside.stalls["moved"] == {"count": 0}
    moved = _judged(_ANSWER, kill, moves={"s": [("v1", "crash")]})
    assert moved.stalls["moved"]["most"] == 2.0
    assert moved.moves == {"crash": 1}
