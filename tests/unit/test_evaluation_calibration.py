"""Observing drafted nodes by what crosses a pair, and the measures of calibration."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from eagle2.errors import ConfigError
from eagle2.evaluation.calibration import (
    brier_score,
    calibration_json,
    calibration_of,
    expected_calibration_error,
    log_loss,
    reliability,
)
from eagle2.evaluation.observations import CalibrationRecorder, Observations, Samples
from eagle2.evaluation.recalibration import (
    Line,
    Recalibration,
    calibration_report,
    fit_line,
    fit_recalibration,
)
from eagle2.transport.base import ProposerLink
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep, DraftTree

Node = tuple[int, int, float]
"""Token, parent (0 is the root), confidence."""

# Under the root 11 and 12; under 11, 21 and 22; under 21, 31.
FAMILY: list[Node] = [(11, 0, 0.6), (12, 0, 0.3), (21, 1, 0.5), (22, 1, 0.25), (31, 3, 0.9)]


class PlannedLink:
    """Gives out the replies that are laid in, whatever is asked."""

    incarnation = 7

    def __init__(self) -> None:
        self.replies: deque[DraftReply] = deque()
        self.sent: list[DraftStep] = []
        self.closed = False

    def send(self, step: DraftStep) -> None:
        self.sent.append(step)

    def receive(self, timeout_s: float) -> DraftReply | None:
        return self.replies.popleft() if self.replies else None

    def close(self) -> None:
        self.closed = True


def entry(sequence: int, cycle: int, base: int, *tokens: int, draft: bool = True) -> DraftEntry:
    return DraftEntry(sequence, cycle, base, torch.zeros(len(tokens), 2), torch.tensor(tokens), draft)


def tree(sequence: int, cycle: int, nodes: list[Node], status: DraftStatus = DraftStatus.OK) -> DraftTree:
    scores: list[float] = []
    for _, parent, confidence in nodes:
        scores.append((scores[parent - 1] if parent else 0.0) + math.log(confidence))
    tokens, parents = torch.tensor([n[0] for n in nodes]), torch.tensor([n[1] for n in nodes])
    return DraftTree(sequence, cycle, status, 0, tokens.long(), parents.long(), torch.tensor(scores))


class Exchange:
    """One recorder on one planned link; ``step`` sends entries and has trees come back."""

    def __init__(self) -> None:
        self.recorder = CalibrationRecorder()
        self.connect()

    def connect(self) -> None:
        self.inner = PlannedLink()
        self.link: ProposerLink = self.recorder.wrap(self.inner)

    def step(self, *entries: DraftEntry, trees: Sequence[DraftTree] = (), closed: tuple[int, ...] = ()) -> None:
        number = len(self.inner.sent) + 1
        self.link.send(DraftStep(1, number, 6, 10, 59, entries, closed))
        if trees:
            self.reply(*trees)

    def reply(self, *trees: DraftTree, incarnation: int = 7) -> None:
        self.inner.replies.append(DraftReply(incarnation, len(self.inner.sent), trees, 0, 0, 0, 0))
        self.link.receive(0.0)


def rows(samples: Samples) -> list[tuple[int, int, float, bool]]:
    found = zip(
        samples.sequence.tolist(),
        samples.depth.tolist(),
        samples.probability.round(6).tolist(),
        samples.accepted.tolist(),
        strict=True,
    )
    return list(found)


def test_the_next_message_says_which_nodes_were_accepted() -> None:
    exchange = Exchange()
    # The root of the first tree stands at position 3: rows 0..2, tokens at 1..3.
    exchange.step(entry(5, 1, 0, 1, 2, 3), trees=[tree(5, 1, FAMILY)])
    exchange.step(entry(5, 2, 3, 11, 21, 99))  # two accepted, then the target's own token
    seen = exchange.recorder.take()
    assert (seen.trees, seen.unobserved) == (1, 0)
    assert rows(seen.steps()) == [
        (5, 1, 0.6, True),
        (5, 1, 0.3, False),
        (5, 2, 0.5, True),
        (5, 2, 0.25, False),
        (5, 3, 0.9, False),
    ]
    assert rows(seen.first_choices()) == [(5, 1, 0.6, True), (5, 2, 0.5, True), (5, 3, 0.9, False)]
    assert rows(seen.paths()) == [
        (5, 1, 0.6, True),
        (5, 1, 0.3, False),
        (5, 2, 0.3, True),
        (5, 2, 0.15, False),
        (5, 3, 0.27, False),
    ]


def test_children_of_a_rejected_node_say_nothing_of_their_own_confidence() -> None:
    exchange = Exchange()
    exchange.step(entry(5, 1, 0, 1), trees=[tree(5, 1, FAMILY)])
    exchange.step(entry(5, 2, 1, 12, 99))
    seen = exchange.recorder.take()
    assert rows(seen.steps()) == [(5, 1, 0.6, False), (5, 1, 0.3, True)]
    assert [accepted for *_, accepted in rows(seen.paths())] == [False, True, False, False, False]


def test_sequences_that_share_messages_are_kept_apart() -> None:
    exchange = Exchange()
    few: list[Node] = [(41, 0, 0.8)]
    exchange.step(entry(1, 1, 0, 9, 9), entry(2, 1, 0, 8), trees=[tree(2, 1, few), tree(1, 1, FAMILY)])
    exchange.step(entry(2, 2, 1, 41, 50), entry(3, 1, 0, 7), trees=[tree(2, 2, few), tree(3, 1, few)])
    exchange.step(entry(1, 2, 2, 77), entry(2, 3, 3, 60))
    seen = exchange.recorder.take()
    assert sorted(rows(seen.steps())) == [
        (1, 1, 0.3, False),
        (1, 1, 0.6, False),
        (2, 1, 0.8, False),
        (2, 1, 0.8, True),
    ]
    assert (seen.trees, seen.unobserved) == (3, 1)  # the tree of sequence 3 still waits
    assert exchange.recorder.take().trees == 0


def test_a_sequence_that_ends_leaves_its_last_tree_unobserved() -> None:
    exchange = Exchange()
    exchange.step(entry(1, 1, 0, 9), trees=[tree(1, 1, FAMILY)])
    exchange.step(closed=(1,))
    exchange.step(entry(1, 1, 0, 11, 21, 31), trees=[tree(1, 1, FAMILY)])  # preempted, and begun anew
    exchange.step(entry(1, 2, 3, 12, 5))
    seen = exchange.recorder.take()
    assert (seen.trees, seen.unobserved) == (1, 1)
    assert rows(seen.steps()) == [(1, 1, 0.6, False), (1, 1, 0.3, True)]


def test_what_comes_late_doubled_or_from_elsewhere_is_passed_over() -> None:
    exchange = Exchange()
    other: list[Node] = [(11, 0, 0.1)]
    exchange.step(entry(1, 1, 0, 9))
    exchange.reply(tree(1, 1, other), incarnation=6)
    exchange.step(entry(1, 2, 1, 10))
    exchange.reply(tree(1, 1, other))
    exchange.reply(tree(1, 2, FAMILY), tree(1, 2, other), tree(4, 1, other))
    exchange.step(entry(1, 3, 2, 11, 99))
    seen = exchange.recorder.take()
    assert [row[2] for row in rows(seen.steps())] == [0.6, 0.3, 0.5, 0.25]
    assert (seen.trees, seen.unobserved) == (1, 0)


def test_missing_and_broken_trees_are_none() -> None:
    exchange = Exchange()
    exchange.step(entry(1, 1, 0, 9), trees=[tree(1, 1, [], DraftStatus.MISSING)])
    backwards = replace(tree(1, 2, [(3, 0, 0.5), (4, 1, 0.5)]), parents=torch.tensor([2, 0]))
    exchange.step(entry(1, 2, 0, 9, 10), trees=[backwards])
    exchange.step(entry(1, 3, 2, 3), trees=[tree(1, 3, FAMILY, DraftStatus.NON_FINITE)])
    exchange.step(entry(1, 4, 3, 4, draft=False), trees=[tree(1, 4, [], DraftStatus.SYNCED)])
    exchange.step(entry(1, 5, 4, 5))
    seen = exchange.recorder.take()
    assert (len(seen.steps()), seen.trees, seen.unobserved) == (0, 0, 0)


def test_rows_sent_anew_do_not_shift_the_walk() -> None:
    exchange = Exchange()
    exchange.step(entry(1, 1, 0, 1, 2, 3), trees=[tree(1, 1, FAMILY)])
    exchange.step(entry(1, 2, 1, 2, 3, 11, 22, 99))  # the proposer had lost rows 1 and 2
    assert [row[3] for row in rows(exchange.recorder.take().steps())] == [True, False, False, True]


def test_where_the_tokens_end_within_the_tree_the_rest_is_unknown() -> None:
    exchange = Exchange()
    exchange.step(entry(1, 1, 0, 9), trees=[tree(1, 1, FAMILY)])
    exchange.step(entry(1, 2, 1, 11))  # a plain step: the verifier did not use the tree
    seen = exchange.recorder.take()
    assert rows(seen.steps()) == [(1, 1, 0.6, True), (1, 1, 0.3, False)]
    assert len(seen.paths()) == 2  # whether 21 would have been accepted, nobody knows


def test_a_root_asked_for_twice_or_skipped_gives_nothing() -> None:
    exchange = Exchange()
    exchange.step(entry(1, 1, 0, 9), trees=[tree(1, 1, FAMILY)])
    exchange.step(entry(1, 2, 0, 9), trees=[tree(1, 2, FAMILY)])
    exchange.step(entry(1, 3, 4, 11))
    seen = exchange.recorder.take()
    assert (len(seen.steps()), seen.trees, seen.unobserved) == (0, 0, 2)


def test_a_new_link_begins_anew() -> None:
    exchange = Exchange()
    exchange.step(entry(1, 1, 0, 9), trees=[tree(1, 1, FAMILY)])
    exchange.link.close()
    assert exchange.inner.closed
    exchange.connect()
    exchange.step(entry(1, 2, 1, 11, 5), trees=[tree(1, 2, FAMILY)])
    exchange.step(entry(1, 3, 3, 12, 6))
    seen = exchange.recorder.take()
    assert (seen.trees, seen.unobserved) == (1, 1)
    assert [row[3] for row in rows(seen.steps())] == [False, True]


def test_halves_share_no_sequence() -> None:
    exchange = Exchange()
    for sequence in (3, 4, 6, 9):
        exchange.step(entry(sequence, 1, 0, 9), trees=[tree(sequence, 1, FAMILY)])
        exchange.step(entry(sequence, 2, 1, 12, 5))
    first, second = exchange.recorder.take().halves
    assert set(first.sequence.tolist()) == {3, 6}
    assert set(second.sequence.tolist()) == {4, 9}
    assert len(first.steps()) == len(second.steps()) == 4


CONFIDENCE = np.array([0.0, 0.1, 0.15, 0.5, 0.55, 0.9, 1.0])
ACCEPTED = np.array([False, False, True, True, False, True, True])


def test_reliability_and_error_against_a_sum_by_hand() -> None:
    table = reliability(CONFIDENCE, ACCEPTED, 2)
    assert [(row.low, row.high, row.count) for row in table] == [(0.0, 0.5, 4), (0.5, 1.0, 3)]
    assert [row.confidence for row in table] == pytest.approx([0.75 / 4, 2.45 / 3])
    assert [row.acceptance for row in table] == pytest.approx([2 / 4, 2 / 3])
    by_hand = 4 / 7 * (2 / 4 - 0.75 / 4) + 3 / 7 * (2.45 / 3 - 2 / 3)
    assert expected_calibration_error(CONFIDENCE, ACCEPTED, 2) == pytest.approx(by_hand)
    # Three, two and two: {0, .1, .15}, {.5, .55}, {.9, 1}.
    by_hand = 3 / 7 * (1 / 3 - 0.25 / 3) + 2 / 7 * (1.05 / 2 - 1 / 2) + 2 / 7 * (1 - 1.9 / 2)
    assert expected_calibration_error(CONFIDENCE, ACCEPTED, 3, equal_mass=True) == pytest.approx(by_hand)


def test_bins_without_predictions_are_left_out() -> None:
    table = reliability(np.array([0.05, 0.95]), np.array([False, True]))
    assert [(row.low, row.high, row.count) for row in table] == [(0.0, 0.1, 1), (0.9, 1.0, 1)]
    assert len(reliability(np.array([0.2]), np.array([True]), 10, equal_mass=True)) == 1
    assert expected_calibration_error(np.empty(0), np.empty(0, dtype=bool)) == 0.0


def test_proper_scores_by_hand() -> None:
    confidence, accepted = np.array([0.8, 0.4]), np.array([True, True])
    assert brier_score(confidence, accepted) == pytest.approx((0.04 + 0.36) / 2)
    assert log_loss(confidence, accepted) == pytest.approx(-(math.log(0.8) + math.log(0.4)) / 2)
    assert log_loss(np.array([0.0]), np.array([True])) == pytest.approx(-math.log(1e-6))
    assert log_loss(np.array([1.0]), np.array([True])) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("confidence", "accepted", "bins", "sentence"),
    [
        ([0.5], [True, False], 10, "one by one"),
        ([0.5, 1.5], [True, False], 10, "between 0 and 1, not 0.5 to 1.5"),
        ([float("nan")], [True], 10, "between 0 and 1"),
        ([0.5], [True], 0, "at least one bin, not 0"),
    ],
)
def test_what_is_no_probability_is_refused(
    confidence: list[float], accepted: list[bool], bins: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        reliability(np.array(confidence), np.array(accepted), bins)


def perfect(count: int, seed: int = 0) -> Samples:
    """Outcomes drawn with the very probabilities that were predicted, over 40 sequences and three depths."""
    random = np.random.default_rng(seed)
    probability = random.uniform(0.01, 0.99, count)
    index = np.arange(count)
    return Samples(index % 40, index % 3 + 1, probability, random.uniform(size=count) < probability)


def test_a_predictor_that_is_right_has_almost_no_error() -> None:
    measured = calibration_of(perfect(50_000))
    assert measured.ece < 0.01
    assert measured.ece_equal_mass < 0.01
    assert measured.brier == pytest.approx(1 / 6, abs=0.01)
    overconfident = perfect(50_000)
    halved = Samples(overconfident.sequence, overconfident.depth, overconfident.probability / 2, overconfident.accepted)
    assert calibration_of(halved).ece == pytest.approx(0.25, abs=0.01)


def test_the_report_has_every_depth_and_adds_up() -> None:
    values = calibration_json(perfect(3_000))
    assert [depth["depth"] for depth in values["by_depth"]] == [1, 2, 3]
    assert sum(depth["count"] for depth in values["by_depth"]) == values["count"] == 3_000
    assert sum(row["count"] for row in values["bins"]) == 3_000
    assert len(values["bins"]) == 10


def test_without_observations_there_is_no_calibration() -> None:
    nothing: Observations = CalibrationRecorder().take()
    with pytest.raises(ConfigError, match="No drafted token was seen"):
        calibration_of(nothing.steps())
    assert len(nothing.paths()) == 0


def sharpened(count: int, temperature: float, sequences: int = 40, seed: int = 1, bias: float = 0.0) -> Samples:
    """Outcomes drawn with p, predictions sigmoid(logit(p) * temperature - bias): what undoes them is known."""
    right = perfect(count, seed)
    odds = np.log(right.probability / (1 - right.probability)) * temperature - bias
    return Samples(np.arange(count) % sequences, right.depth, 1 / (1 + np.exp(-odds)), right.accepted)


def as_observations(samples: Samples) -> Observations:
    """All of them children of an accepted parent, under parents that were certain."""
    confidences = np.full((len(samples), 3), np.nan)
    for row, depth in enumerate(samples.depth.tolist()):
        confidences[row, : depth - 1] = 1.0
        confidences[row, depth - 1] = samples.probability[row]
    yes = np.ones(len(samples), dtype=np.bool_)
    return Observations(samples.sequence, samples.depth, confidences, yes, samples.accepted, yes, 7, 2)


@pytest.mark.parametrize(("temperature", "bias"), [(0.5, 0.0), (1.0, 0.0), (2.0, 0.0), (1.25, -1.0)])
def test_a_known_temperature_and_bias_are_found(temperature: float, bias: float) -> None:
    samples = sharpened(40_000, temperature, bias=bias)
    found = fit_line(samples.probability, samples.accepted)
    assert 1 / found.slope == pytest.approx(temperature, rel=0.03)
    assert found.bias == pytest.approx(bias / temperature, abs=0.04)
    again = fit_recalibration(samples).of_tokens(samples)
    assert log_loss(again.probability, again.accepted) <= log_loss(samples.probability, samples.accepted)
    assert calibration_of(again).ece < 0.01


def test_each_depth_has_its_own_line_where_samples_are_enough() -> None:
    first, second = sharpened(20_000, 2.0), sharpened(20_000, 0.5, seed=2)
    few = sharpened(60, 1.0)
    joined = Samples(
        sequence=np.concatenate([first.sequence, second.sequence, few.sequence]),
        depth=np.repeat([1, 2, 3], [20_000, 20_000, 60]),
        probability=np.concatenate([first.probability, second.probability, few.probability]),
        accepted=np.concatenate([first.accepted, second.accepted, few.accepted]),
    )
    found = fit_recalibration(joined)
    assert [line.slope for line in found.by_depth] == pytest.approx([0.5, 2.0], rel=0.05)
    assert 0.5 < found.overall.slope < 2.0
    by_hand = Recalibration(Line(1.0, math.log(2)), (Line(0.5), Line(2.0)))
    # Odds of 4 to 1: the square root at depth 1, the square at depth 2, twice the odds behind.
    assert by_hand.probability(np.full(3, 0.8), np.array([1, 2, 9])) == pytest.approx([2 / 3, 16 / 17, 8 / 9])


def test_values_are_products_of_recalibrated_confidences() -> None:
    squaring = Recalibration(Line(), (Line(2.0),))
    values = squaring.values(np.array([[0.8, 0.5], [0.8, np.nan]]))
    assert values == pytest.approx([16 / 17 * 0.5, 16 / 17])
    assert Recalibration(Line()).values(np.array([[0.0, 0.5], [1.0, np.nan]])) == pytest.approx([0.0, 1.0], abs=1e-5)


def test_the_report_measures_on_texts_that_were_not_fitted() -> None:
    report = calibration_report(as_observations(sharpened(20_000, 2.0)))
    assert (report["trees"], report["unobserved"]) == (7, 2)
    recalibration = report["recalibration"]
    assert recalibration["overall"]["slope"] == pytest.approx(0.5, rel=0.05)
    held_out = recalibration["held_out"]
    assert held_out["sequences"] == 20
    assert held_out["before"]["count"] == held_out["after"]["count"] == 10_000
    assert held_out["before"]["ece"] > 0.08
    for after in ("after", "after_one_line", "first_choices_after", "paths_after"):
        assert held_out[after]["ece"] < 0.02
        assert held_out[after]["log_loss"] < held_out["before"]["log_loss"]
    json.dumps(report)


def test_one_text_alone_gives_errors_and_no_recalibration() -> None:
    report = calibration_report(as_observations(sharpened(500, 2.0, sequences=1)))
    assert report["recalibration"] is None
    assert report["steps"]["count"] == 500


def test_a_line_needs_samples_and_stays_within_reason() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        fit_line(np.empty(0), np.empty(0, dtype=np.bool_))
    for outcome in (True, False):
        found = fit_line(np.array([0.0, 0.5, 1.0]), np.full(3, outcome))
        assert abs(found.slope - 1) < 2
        assert abs(found.bias) < 10
