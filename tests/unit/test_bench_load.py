"""Closed and open loops against an engine that only counts, and what is made of their times."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from statistics import fmean

import pytest

from eagle2.errors import Eagle2Error
from eagle2.evaluation.load.cells import Cell, Load, cell_of
from eagle2.evaluation.load.closed_loop import closed_loop
from eagle2.evaluation.load.intervals import paired_ratio, percentile
from eagle2.evaluation.load.load_report import best_fixed, load_json, load_text
from eagle2.evaluation.load.open_loop import open_loop, poisson_arrivals
from eagle2.evaluation.load.rounds import rotated
from eagle2.evaluation.load.texts import Texts
from eagle2.evaluation.load.trace import Answer, Reading, Trace
from eagle2.protocol import Commit, GenerationRequest, ModelDescription, Usage
from eagle2.telemetry import metrics

PROMPTS = {"a": (1,), "b": (2,), "c": (3,)}


class _Engine:
    """Commits two tokens at a time for every stream, a step for all of them; fails on the prompt ``poison``."""

    def __init__(self, poison: int | None = None) -> None:
        self.running = self.most = 0
        self.requests: list[GenerationRequest] = []
        self._poison = poison

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            left = request.stop.max_tokens
            while left > 0:
                await asyncio.sleep(0)
                if request.prompt_ids[0] == self._poison:
                    yield Commit((), "", "error", error="It is poison.")
                    return
                count = min(2, left)
                left -= count
                yield Commit((7,) * count, "", None if left else "length", None if left else Usage(1, 1, 0, 0, 0, 0))
        finally:
            self.running -= 1

    async def describe(self) -> ModelDescription:
        raise NotImplementedError

    async def stats(self) -> dict[str, float]:
        return {}


class _Ticks:
    """A clock that moves by one each time it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now

    def read(self) -> Reading:
        return Reading(self(), self.now / 2, {})


async def _closed(engine: _Engine, concurrency: int, max_tokens: int = 8, window: int = 40) -> Trace:
    clock = _Ticks()
    return await closed_loop(engine, PROMPTS, concurrency, max_tokens, window, clock.read, clock=clock)


async def test_a_closed_loop_keeps_so_many_sequences_running() -> None:
    engine = _Engine()
    trace = await _closed(engine, concurrency=4)
    assert engine.most == 4
    assert engine.running == 0  # what was cut off has been closed
    # The first answers have lengths of their own, so that the later ones do not end all at once.
    assert [request.stop.max_tokens for request in engine.requests[:4]] == [2, 4, 6, 8]
    assert {request.stop.max_tokens for request in engine.requests[4:]} == {8}
    assert [answer.prompt for answer in trace.answers[:5]] == ["a", "b", "c", "a", "b"]
    assert all(answer.commits[0][0] <= trace.begin.time for answer in trace.answers[:4])


async def test_a_window_has_the_tokens_that_were_asked_for() -> None:
    trace = await _closed(_Engine(), concurrency=3, window=40)
    cell = cell_of("x", Load(concurrency=3), 1, trace)
    assert 40 <= cell.tokens < 42  # it ends with a commit
    assert cell.wall_s == trace.end.time - trace.begin.time > 0
    assert cell.cpu_s == cell.wall_s / 2
    assert 1.8 < cell.tau <= 2.0


async def test_an_error_ends_a_load() -> None:
    with pytest.raises(Eagle2Error, match="It is poison"):
        await asyncio.wait_for(_closed(_Engine(poison=3), concurrency=2), timeout=10)


def test_arrivals_are_poisson_and_the_same_for_the_same_seed() -> None:
    arrivals = poisson_arrivals(4.0, 4000, seed=1)
    assert arrivals == poisson_arrivals(4.0, 4000, seed=1)
    assert arrivals != poisson_arrivals(4.0, 4000, seed=2)
    pauses = [b - a for a, b in zip([0.0, *arrivals], arrivals, strict=False)]
    assert fmean(pauses) == pytest.approx(0.25, rel=0.1)
    assert sum(pause > 0.25 for pause in pauses) / 4000 == pytest.approx(math.exp(-1), abs=0.05)


async def test_an_open_loop_sends_when_requests_are_due_and_counts_from_then_on() -> None:
    engine = _Engine()
    now = asyncio.get_running_loop().time
    trace = await open_loop(
        engine, PROMPTS, [0.0, 0.01, 0.01, 0.2], 6, lambda: Reading(now(), 0.0, {}), speculation=False, clock=now
    )
    assert [answer.prompt for answer in trace.answers] == ["a", "b", "c", "a"]
    assert [answer.due - trace.begin.time for answer in trace.answers] == pytest.approx([0.0, 0.01, 0.01, 0.2])
    assert all(answer.sent >= answer.due for answer in trace.answers)
    assert all(answer.finish_reason == "length" for answer in trace.answers)
    assert not any(request.speculation for request in engine.requests)
    cell = cell_of("x", Load(rate=4.0), 1, trace)
    assert len(cell.late_s) == len(cell.first_token_s) == 4
    assert cell.tokens == 24


def test_a_cell_counts_what_lies_in_its_window() -> None:
    early = Answer(
        "a", due=0.0, sent=0.5, token_ids=[1] * 14, commits=[(1.0, 1), (2.0, 3), (4.0, 4), (8.0, 4), (12.0, 2)]
    )
    inside = Answer("b", due=5.0, sent=5.5, token_ids=[1, 2], commits=[(7.0, 1), (9.0, 1)])
    key = metrics.CYCLES.sample()
    trace = Trace([early, inside], Reading(1.5, 10.0, {key: 3.0}), Reading(10.0, 14.0, {key: 9.0}))
    cell = cell_of("x", Load(concurrency=2), 1, trace)
    assert cell.tokens == 3 + 4 + 4 + 1 + 1
    assert cell.wall_s == 8.5
    assert cell.cpu_s == 4.0
    assert cell.first_token_s == (2.0,)  # the other one was due before
    assert cell.token_s == ((8.0 - 2.0) / 8,)  # one token is too few
    assert sorted(cell.gap_s) == [2.0, 2.0, 4.0]
    assert cell.tau == (3 + 4 + 4 + 1) / 4  # a first commit is no cycle
    assert cell.late_s == (0.5,)
    assert cell.cycles == 6


def _answer(prompt: str, ids: list[int], reason: str = "length") -> Answer:
    return Answer(prompt, 0.0, token_ids=ids, finish_reason="stop" if reason == "stop" else "length")


@pytest.mark.parametrize(
    ("first", "second", "position"),
    [
        (([1, 2, 3], "length"), ([1, 2], "length"), None),
        (([1, 2], "length"), ([1, 2, 3], "stop"), None),
        (([1, 2, 3], "length"), ([1, 9], "length"), 1),
        (([1, 2], "stop"), ([1, 2, 3], "length"), 2),
        (([1, 2, 3], "length"), ([1, 2], "stop"), 2),
        (([1, 2], "stop"), ([1, 2], "stop"), None),
    ],
)
def test_answers_must_be_beginnings_of_each_other(
    first: tuple[list[int], str], second: tuple[list[int], str], position: int | None
) -> None:
    texts = Texts()
    texts.compare("off", Load(concurrency=1), 1, [_answer("a", *first), _answer("b", [5])])
    texts.compare("fixed", Load(concurrency=2), 2, [_answer("a", *second)])
    assert texts.compared == 1
    assert [lost.position for lost in texts.lost] == ([] if position is None else [position])


def test_a_ratio_is_paired_and_has_a_t_interval() -> None:
    # The machine is twice as slow in the second round, and the ratio the same.
    exact = paired_ratio([20.0, 10.0, 30.0], [10.0, 5.0, 15.0])
    assert exact.mean == pytest.approx(2.0)
    assert exact.interval == pytest.approx((2.0, 2.0))
    spread = paired_ratio([math.e, 1.0, math.e**2], [1.0, 1.0, 1.0])
    assert spread.mean == pytest.approx(math.e)
    assert spread.interval is not None
    # t(0.95, 2) = 2.920, the standard deviation of 1, 0 and 2 is 1.
    assert math.log(spread.interval[1]) == pytest.approx(1 + 2.920 / math.sqrt(3), abs=1e-3)
    assert paired_ratio([3.0], [2.0]).interval is None
    many = paired_ratio([math.exp(i % 2) for i in range(31)], [1.0] * 31)
    assert many.interval is not None
    # t(0.95, 30) = 1.697
    half = (math.log(many.interval[1]) - math.log(many.interval[0])) / 2
    assert half == pytest.approx(1.697 * math.sqrt(15 * 16 / (31 * 30)) / math.sqrt(31), rel=1e-3)


def test_percentiles() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.95) == 4.0
    assert percentile([], 0.5) is None


def test_prompts_are_asked_from_another_one_on() -> None:
    assert list(rotated(PROMPTS, 1)) == ["b", "c", "a"]
    assert list(rotated(PROMPTS, 5)) == ["c", "a", "b"]


def _cells() -> Iterator[Cell]:
    rates = {"off": 10.0, "fixed 10/2/8": 16.0, "fixed 17/3/10": 12.0, "adaptive": 18.0}
    for load in (Load(concurrency=1), Load(concurrency=8)):
        for number in (1, 2):
            for name, rate in rates.items():
                if load.concurrency == 8 and name.startswith("fixed"):
                    rate = 28.0 - rate
                trace = Trace([Answer("a", 0.0, commits=[(0.5, int(rate * 10))])], *_readings(10.0 * number))
                yield cell_of(name, load, number, trace)


def _readings(seconds: float) -> tuple[Reading, Reading]:
    return Reading(0.0, 0.0, {}), Reading(seconds, seconds / 4, {})


def test_the_report_sets_adaptive_against_all_others_and_names_the_best_tree() -> None:
    cells = list(_cells())
    assert best_fixed(cells, Load(concurrency=1), lambda cell: cell.rate) == "fixed 10/2/8"
    assert best_fixed(cells, Load(concurrency=8), lambda cell: cell.rate) == "fixed 17/3/10"
    text = load_text(cells, Texts())
    assert "| tok/s, paired by round" in text
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if "|" in line
    }
    assert rows["adaptive / off"] == ["1.80 [1.80, 1.80]", "1.80 [1.80, 1.80]"]
    assert rows["adaptive / best fixed"] == ["1.12 [1.12, 1.12] (10/2/8)", "1.12 [1.12, 1.12] (17/3/10)"]
    values = json.loads(json.dumps(load_json(cells, Texts()), allow_nan=False))
    assert len(values["cells"]) == 16
    assert values["lossless"] is True
    assert values["summaries"][0]["contender"] == "off"
    assert values["summaries"][0]["first_token_s_p50"] == 0.5


def test_the_report_cannot_hide_a_lost_token() -> None:
    texts = Texts()
    texts.compare("off", Load(concurrency=8), 1, [_answer("a", [1, 2])])
    texts.compare("adaptive", Load(concurrency=8), 1, [_answer("a", [1, 3])])
    text = load_text(list(_cells()), texts)
    assert "NOT LOSSLESS: 1 answers" in text
    assert "adaptive on a with 8 at once in round 1, at position 1" in text
    assert load_json(list(_cells()), texts)["lossless"] is False
