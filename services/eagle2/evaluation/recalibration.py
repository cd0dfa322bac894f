"""From a draft's confidence to the chance that its token is accepted: a line through the log-odds, for each depth.

A confidence p becomes sigmoid(slope * logit(p) + bias): Platt scaling (Platt 1999; Guo et al. 2017, section 4.2) of the
yes-or-no question "is this token accepted". With a bias of 0 it is temperature scaling, the slope being 1/T. The order
of siblings stays, so the map changes what a tree is expected to yield and not which token is the likeliest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from eagle2.errors import ConfigError
from eagle2.evaluation.calibration import SMALLEST, calibration_json, calibration_of
from eagle2.evaluation.observations import Booleans, Floats, Integers, Observations, Samples

_FEWEST = 100  # samples of a depth that has a line of its own
_STEPS = 50  # of Newton's method, which needs about six


@dataclass(frozen=True, slots=True)
class Line:
    """Log-odds of acceptance = ``slope`` * log-odds of the confidence + ``bias``."""

    slope: float = 1.0
    bias: float = 0.0


@dataclass(frozen=True, slots=True)
class Recalibration:
    """``by_depth[d - 1]`` is the line at depth d; deeper nodes have ``overall``."""

    overall: Line
    by_depth: tuple[Line, ...] = ()

    def probability(self, confidence: Floats, depth: Integers) -> Floats:
        """The chance that a token is accepted once its parent is. confidence (M,) in [0, 1], depth (M,) from 1 on."""
        lines = (*self.by_depth, self.overall)
        place = np.minimum(depth - 1, len(self.by_depth))
        slope, bias = (np.array([getattr(line, name) for line in lines])[place] for name in ("slope", "bias"))
        return _sigmoid(slope * _logit(confidence) + bias)

    def values(self, confidences: Floats) -> Floats:
        """The chance that a whole path is accepted: a product. confidences (N, D) by depth, NaN behind the node."""
        depth = np.arange(1, confidences.shape[1] + 1)
        columns = [self.probability(confidences[:, d - 1], np.full(len(confidences), d)) for d in depth.tolist()]
        values: Floats = np.nanprod(np.stack(columns, axis=1), axis=1)
        return values

    def of_tokens(self, samples: Samples) -> Samples:
        """Steps or first choices, recalibrated."""
        return replace(samples, probability=self.probability(samples.probability, samples.depth))

    def of_paths(self, observations: Observations) -> Samples:
        return replace(observations.paths(), probability=self.values(observations.confidences))


def fit_line(confidence: Floats, accepted: Booleans) -> Line:
    """The line with the least log loss: logistic regression by Newton's method. Raises ``ConfigError`` without samples.

    A normal prior of unit width around the identity weighs as much as a few samples, so that outcomes that are all
    alike do not run away.
    """
    if not len(confidence):
        raise ConfigError("A line cannot be fitted to no samples.")
    inputs = np.stack([_logit(confidence), np.ones(len(confidence))], axis=1)
    identity = np.array([1.0, 0.0])
    found = identity.copy()
    for _ in range(_STEPS):
        predicted = _sigmoid(inputs @ found)
        gradient = inputs.T @ (predicted - accepted) + (found - identity)
        curvature = (inputs * (predicted * (1 - predicted))[:, None]).T @ inputs + np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        # A long step may overshoot where the curve is flat.
        found = found - step / max(1.0, float(np.abs(step).max()))
        if float(np.abs(step).max()) < 1e-10:
            break
    return Line(float(found[0]), float(found[1]))


def fit_recalibration(samples: Samples) -> Recalibration:
    """A line for all depths, and one for each depth with samples enough, up to the first without.

    Raises ``ConfigError`` without samples.
    """
    overall = fit_line(samples.probability, samples.accepted)
    by_depth = []
    for depth in range(1, int(samples.depth.max()) + 1):
        own = samples.where(samples.depth == depth)
        if len(own) < _FEWEST:
            break
        by_depth.append(fit_line(own.probability, own.accepted))
    return Recalibration(overall, tuple(by_depth))


def calibration_report(observations: Observations) -> dict[str, Any]:
    """Everything that is known of a head's calibration, for the bench's JSON.

    ``steps`` (every drafted token that the target decided on), ``first_choices`` (of these the likeliest of its place)
    and ``paths`` (whole paths) are measured on all samples. ``recalibration`` is fitted on all samples too; its errors
    ``before`` and ``after`` are of one half of the sequences, with a fit on the other half. It is None where there are
    no two sequences. Raises ``ConfigError`` where nothing was observed.
    """
    report: dict[str, Any] = {
        "trees": observations.trees,
        "unobserved": observations.unobserved,
        "steps": calibration_json(observations.steps()),
        "first_choices": calibration_json(observations.first_choices()),
        "paths": calibration_json(observations.paths()),
        "recalibration": None,
    }
    fitted, held_out = observations.halves
    if not len(fitted.steps()) or not len(held_out.steps()):
        return report
    half = fit_recalibration(fitted.steps())
    single = replace(half, by_depth=())
    report["recalibration"] = {
        **asdict(fit_recalibration(observations.steps())),
        "held_out": {
            "fitted": asdict(half),
            "sequences": len(np.unique(held_out.sequence)),
            "before": calibration_json(held_out.steps()),
            "after": calibration_json(half.of_tokens(held_out.steps())),
            "after_one_line": asdict(calibration_of(single.of_tokens(held_out.steps()))),
            "first_choices_before": asdict(calibration_of(held_out.first_choices())),
            "first_choices_after": asdict(calibration_of(half.of_tokens(held_out.first_choices()))),
            "paths_before": asdict(calibration_of(held_out.paths())),
            "paths_after": asdict(calibration_of(half.of_paths(held_out))),
        },
    }
    return report


def _logit(probability: Floats) -> Floats:
    bounded = np.clip(probability, SMALLEST, 1 - SMALLEST)
    return np.log(bounded) - np.log1p(-bounded)


def _sigmoid(logits: Floats) -> Floats:
    return 0.5 * (1 + np.tanh(logits / 2))
