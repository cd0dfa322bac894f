"""``eagle2 bench`` on a small trained pair, beside ``transformers`` on the same weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from eagle2.cli import main
from eagle2.errors import ConfigError
from eagle2.evaluation.baseline import TransformersBaseline
from eagle2.evaluation.measure import Generation
from eagle2.evaluation.trees import PAPER, parse_shapes, shape_name
from eagle2.speculative.draft import TreeShape
from fakes.checkpoints import questions_flags
from fakes.lossy import change_drafted_tokens

SENTENCES = ("our neighbour buys the red mirror ", "the old sailor ", "the queen follows the silver ")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return questions_flags(tmp_path_factory.mktemp("bench"), SENTENCES)


def test_three_systems_are_measured_in_one_run(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-tokens", "24", "--limit", "2", "--shapes", "8/4/4,2/1/2", "--out", str(tmp_path / "out")]
    assert main(["bench", *options, *flags]) == 0
    shown = capsys.readouterr()
    assert "Token ids with speculation on and off are identical on all 2 prompts in every round." in shown.out
    # The sums are in another order, but float32 is fine enough for this model.
    assert "`transformers` gives the same token ids on 2 of 2 prompts." in shown.out
    assert "float32" in shown.out
    assert "round 3/3" in shown.err

    values = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert (tmp_path / "out" / "speed.md").read_text() == shown.out
    names = ["transformers", "eagle2, plain", "eagle2, tree 8/4/4", "eagle2, tree 2/1/2"]
    assert list(values["systems"]) == names
    for system in values["systems"].values():
        assert len(system["decode_rates"]) == 3
        assert all(rate > 0 for rate in system["decode_rates"] + system["total_rates"])
    taus = [values["systems"][name]["tau"] for name in names]
    assert taus[0] is None
    assert taus[1] == 1.0
    assert 1.0 < taus[3] <= 2.0
    assert taus[3] < taus[2] <= 5.0
    assert len(values["runs"]) == 3 * 2 * 4
    assert values["model"]["prompts"] == 2
    assert values["commit"]
    assert values["cores"] >= values["threads"] == 1


def test_a_baseline_that_differs_is_reported_with_the_gap_and_fails_nothing(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = TransformersBaseline.generate

    def generate(self: TransformersBaseline, prompt_ids: Sequence[int], max_tokens: int) -> Generation:
        answer = original(self, prompt_ids, max_tokens)
        ids = answer.token_ids
        return replace(answer, token_ids=(*ids[:2], ord("z"), *ids[3:]))

    monkeypatch.setattr(TransformersBaseline, "generate", generate)
    options = ["--max-tokens", "6", "--limit", "1", "--rounds", "1", "--draft", "none", "--out", str(tmp_path)]
    assert main(["bench", *flags, *options]) == 0
    (difference,) = json.loads((tmp_path / "speed.json").read_text())["transformers_differs"]
    assert difference["position"] == 2
    assert difference["gap"] > 1.0  # z is nothing that this model would have said
    expected = f"on 0 of 1 prompts; on the others the first difference is at position 2 (gap {difference['gap']:.3f})."
    assert expected in capsys.readouterr().out


def test_a_changed_token_is_reported_and_fails(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change_drafted_tokens(monkeypatch)
    options = ["--max-tokens", "6", "--limit", "1", "--rounds", "1", "--no-baseline"]
    assert main(["bench", *options, *flags]) == 1
    shown = capsys.readouterr().out
    assert "NOT LOSSLESS: 1 runs" in shown
    assert "eagle2, tree 24/4/10 on asked/1 in round 1, at position 0" in shown


def test_without_a_draft_head_two_systems_remain(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "6", "--limit", "1", "--rounds", "1", "--draft", "none"]
    assert main(["bench", *flags, *options]) == 0
    shown = capsys.readouterr().out
    assert "speculation on and off" not in shown
    first = [line.split("|")[1].strip() for line in shown.splitlines()[2:4]]
    assert first == ["transformers", "eagle2, plain"]
    assert main(["bench", "--tau-only", *flags, *options]) == 1
    assert main(["bench", "--shapes", "8/4/4", *flags, *options]) == 1
    refused = capsys.readouterr().err.splitlines()
    assert refused[0].endswith("Tables of methods and --tau-only measure a draft head, and --draft is none.")
    assert refused[1].endswith("--shapes compares trees of a draft head, and --draft is none.")


def test_missing_transformers_is_one_sentence(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["bench", *flags]) == 1
    assert "needs the package transformers, which is not installed" in capsys.readouterr().err


def test_shapes_are_drafted_tokens_depth_and_top_k() -> None:
    shapes = parse_shapes("8/4/3, 16/5/6,paper")
    assert shapes == (TreeShape(4, 3, 9), TreeShape(5, 6, 17), PAPER)
    assert [shape_name(shape) for shape in shapes] == ["8/4/3", "16/5/6", "59/6/10"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("8/4", "'8/4' is no tree shape"),
        ("", "'' is no tree shape"),
        ("a/b/c", "'a/b/c' is no tree shape"),
        ("8/0/4", "The tree shape 8/0/4 has a number below 1"),
        ("8/4/4,8/4/4", "The tree shape 8/4/4 is named twice"),
    ],
)
def test_a_shape_that_is_none_is_named(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_shapes(text)
