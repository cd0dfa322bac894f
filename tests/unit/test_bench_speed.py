"""Interleaved rounds, and what is made of their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from eagle2.errors import ConfigError
from eagle2.evaluation.measure import Generation, first_difference
from eagle2.evaluation.report import Comparison, markdown_table, speed_json, speed_text
from eagle2.evaluation.speed import Difference, Run, System, differences, measure_speed, ratio, speed_of

PROMPTS = {"p": (1,), "q": (2,)}


class _Recorder:
    """Systems that say who was asked what, in which order."""

    def __init__(self, *names: str) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.systems = {name: self._system(name) for name in names}

    def _system(self, name: str) -> System:
        def answer(prompt_ids: Sequence[int], max_tokens: int) -> Generation:
            self.calls.append((name, prompt_ids[0], max_tokens))
            return Generation((7,) * max_tokens, 1.0, 1.0 + max_tokens)

        return answer


def test_every_round_and_prompt_starts_with_the_next_system() -> None:
    recorder = _Recorder("a", "b", "c")
    runs = measure_speed(recorder.systems, PROMPTS, 20, 3, lambda _: None)
    warm_up, measured = recorder.calls[:3], recorder.calls[3:]
    assert warm_up == [("a", 1, 16), ("b", 1, 16), ("c", 1, 16)]
    assert [call[0] for call in measured] == [*"abc", *"bca", *"bca", *"cab", *"cab", *"abc"]
    assert [(run.system, PROMPTS[run.prompt][0], 20) for run in runs] == measured
    assert [run.round for run in runs] == [1] * 6 + [2] * 6 + [3] * 6


def test_no_round_measures_nothing() -> None:
    with pytest.raises(ConfigError, match="rounds must be at least 1, not 0"):
        measure_speed(_Recorder("a").systems, PROMPTS, 4, 0, lambda _: None)


def _run(
    number: int, system: str, prompt: str, tokens: int, decode_s: float, first_s: float = 0.5, cycles: int = 0
) -> Run:
    return Run(number, system, prompt, Generation(tuple(range(tokens)), first_s, first_s + decode_s, cycles))


RUNS = [
    _run(1, "plain", "p", 11, 1.0, cycles=10),
    _run(1, "plain", "q", 31, 2.0, cycles=30),
    _run(2, "plain", "p", 11, 2.0, cycles=10),
    _run(2, "plain", "q", 31, 2.0, cycles=30),
    _run(3, "plain", "p", 11, 4.0, cycles=10),
    _run(3, "plain", "q", 31, 4.0, cycles=30),
    _run(1, "tree", "p", 11, 0.5, first_s=0.1, cycles=4),
    _run(1, "tree", "q", 31, 1.0, first_s=0.2, cycles=12),
    _run(2, "tree", "p", 11, 1.0, first_s=0.3, cycles=4),
    _run(2, "tree", "q", 31, 3.0, first_s=0.4, cycles=12),
    _run(3, "tree", "p", 11, 1.0, first_s=0.5, cycles=4),
    _run(3, "tree", "q", 31, 1.0, first_s=0.6, cycles=12),
]


def test_a_rate_is_all_tokens_of_a_round_by_all_its_seconds() -> None:
    speed = speed_of("plain", RUNS)
    assert speed.decode_rates == pytest.approx((40 / 3, 40 / 4, 40 / 8))  # the first token is not decoding
    assert speed.total_rates == pytest.approx((42 / 4, 42 / 5, 42 / 9))
    assert speed.tau == 1.0
    tree = speed_of("tree", RUNS)
    assert tree.tau == pytest.approx(40 / 16)
    assert tree.first_token_s == pytest.approx(0.35)
    assert speed_of("x", [_run(1, "x", "p", 5, 1.0)]).tau is None


def test_a_ratio_compares_within_rounds() -> None:
    # 2, 1 and 4 in the three rounds; the ratio of the medians would be 1.
    assert ratio(speed_of("tree", RUNS), speed_of("plain", RUNS)) == pytest.approx(2.0)


def test_tokens_are_compared_with_the_references_first_run() -> None:
    same, other, shorter = (1, 2, 3), (1, 9, 3), (1, 2)
    runs = [
        Run(number, system, "p", Generation(ids, 0.1, 1.0))
        for number, system, ids in (
            *((1, "plain", same), (1, "tree", same), (2, "plain", other)),
            *((2, "tree", shorter), (3, "plain", same), (3, "tree", same)),
        )
    ]
    assert differences("tree", "plain", runs) == [Difference("tree", "p", 2, 2)]
    assert differences("plain", "plain", runs) == [Difference("plain", "p", 2, 1)]


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [((), (), None), ((1, 2), (1, 2), None), ((1, 2), (3, 2), 0), ((1, 2), (1,), 1), ((), (5,), 0)],
)
def test_the_first_difference(a: tuple[int, ...], b: tuple[int, ...], position: int | None) -> None:
    assert first_difference(a, b) == first_difference(b, a) == position


def _comparison(lost: Sequence[Difference] = (), baseline: str | None = None, dtype: str = "bfloat16") -> Comparison:
    runs = [*RUNS, *([_run(i, baseline, p, 5, 1.0) for i in (1, 2, 3) for p in "pq"] if baseline else [])]
    systems = tuple(dict.fromkeys(run.system for run in runs))
    return Comparison(systems, "plain", baseline, runs, lost, dtype)


def test_the_report_has_medians_ratios_and_every_round() -> None:
    text = speed_text(_comparison(baseline="transformers"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:5]]
    cells = {name: values for name, *values in rows}
    assert cells["plain"] == ["10.0", "8.4", "0.50", "1.00", "2.50", "1.00"]
    assert cells["tree"] == ["20.0", "13.5", "0.35", "2.50", "5.00", "2.00"]
    assert cells["transformers"][3] == ""
    assert "identical on all 2 prompts in every round" in text
    assert "13.3 |    10.0 |     5.0" in text
    values = speed_json(_comparison(baseline="transformers"))
    assert values["lossless"] is True
    assert values["systems"]["tree"]["times_plain"] == pytest.approx(2.0)
    assert len(values["runs"]) == 18


def test_the_report_says_where_transformers_differs_and_why() -> None:
    differing = replace(_comparison(baseline="transformers"), gaps={"q": 0.125})
    said = (
        "gives the same token ids on 0 of 2 prompts; on the others the first difference is at position 5, 5 (gap 0.125)"
    )
    assert f"{said}: sums in another order, rounded to bfloat16" in speed_text(differing)
    # In float32 rounding is no excuse.
    assert f"{said}." in speed_text(replace(differing, dtype="float32"))
    gaps = {entry["prompt"]: entry["gap"] for entry in speed_json(differing)["transformers_differs"]}
    assert gaps == {"p": None, "q": 0.125}


def test_the_report_cannot_hide_a_lost_token() -> None:
    lost = _comparison([Difference("tree", "q", 2, 17), Difference("tree", "q", 3, 17)])
    text = speed_text(lost)
    assert "NOT LOSSLESS: 2 runs gave other tokens" in text
    assert "tree on q in round 2, at position 17" in text
    assert "identical" not in text
    assert speed_json(lost)["lossless"] is False


def test_tables_line_up() -> None:
    table = markdown_table(["", "tok/s"], [["plain", "9.5"], ["a tree", "12.25"]])
    assert table.splitlines() == [
        "|        | tok/s |",
        "|--------|------:|",
        "| plain  |   9.5 |",
        "| a tree | 12.25 |",
    ]
