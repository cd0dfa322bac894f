"""How far a draft head's confidence can be believed: reliability, calibration error, proper scores.

Definitions: expected calibration error and reliability diagrams after Guo et al., "On Calibration of Modern Neural
Networks" (2017), section 2; bins of equal mass after Nguyen and O'Connor, "Posterior calibration and exploratory
analysis for natural language processing models" (2015). Brier score and log loss are proper scores of a yes-or-no
outcome: nothing but the true probability minimises them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eagle2.errors import ConfigError
from eagle2.evaluation.observations import Booleans, Floats, Samples

BINS = 10
# A probability of 0 or 1 that turns out wrong would cost infinitely much.
SMALLEST = 1e-6


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions that lie together: their range, how many, their mean, and the share that was accepted."""

    low: float
    high: float
    count: int
    confidence: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What samples say of a predictor. Errors are differences of probabilities; log loss is in nats.

    ``confidence`` and ``acceptance`` are means over all ``count`` predictions.
    """

    count: int
    confidence: float
    acceptance: float
    ece: float
    ece_equal_mass: float
    brier: float
    log_loss: float
    bins: tuple[Bin, ...]


def reliability(
    confidence: Floats, accepted: Booleans, bins: int = BINS, *, equal_mass: bool = False
) -> tuple[Bin, ...]:
    """The table behind a reliability diagram; bins that hold nothing are left out.

    confidence: (M,) in [0, 1]. accepted: (M,). Bins are of equal width, ((i - 1)/bins, i/bins], 0 belonging to the
    first, or of equal mass: as many predictions in each as can be, their range that of what they hold.
    Raises ``ConfigError`` for arrays of unlike lengths, a confidence that is no probability, fewer than one bin.
    """
    if confidence.shape != accepted.shape or confidence.ndim != 1:
        raise ConfigError(
            f"Confidences and outcomes belong together one by one, not {confidence.shape} and {accepted.shape}."
        )
    if bins < 1:
        raise ConfigError(f"There is at least one bin, not {bins}.")
    if not bool(((confidence >= 0) & (confidence <= 1)).all()):
        raise ConfigError(f"A confidence lies between 0 and 1, not {confidence.min()} to {confidence.max()}.")
    if equal_mass:
        order = np.argsort(confidence, kind="stable")
        parts = [part for part in np.array_split(order, bins) if len(part)]
        return tuple(
            _bin(confidence[part], accepted[part], float(confidence[part[0]]), float(confidence[part[-1]]))
            for part in parts
        )
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    return tuple(
        _bin(confidence[place == i], accepted[place == i], i / bins, (i + 1) / bins) for i in np.unique(place).tolist()
    )


def expected_calibration_error(
    confidence: Floats, accepted: Booleans, bins: int = BINS, *, equal_mass: bool = False
) -> float:
    """The mean over all predictions of |acceptance - confidence| of their bin; 0 without predictions.

    ECE = sum over bins of |B|/M * |acc(B) - conf(B)| (Guo et al., equation 3). Arguments and errors as ``reliability``.
    """
    return _error(reliability(confidence, accepted, bins, equal_mass=equal_mass))


def brier_score(confidence: Floats, accepted: Booleans) -> float:
    """Mean squared difference of confidence and outcome: 0 is best, 0.25 is a coin's."""
    return float(np.mean((confidence - accepted) ** 2))


def log_loss(confidence: Floats, accepted: Booleans) -> float:
    """Mean negative log-likelihood of the outcomes, nats: 0 is best, 0.69 is a coin's."""
    bounded = np.clip(confidence, SMALLEST, 1 - SMALLEST)
    return float(-np.mean(np.where(accepted, np.log(bounded), np.log1p(-bounded))))


def calibration_of(samples: Samples, bins: int = BINS) -> Calibration:
    """All measures of some samples. Raises ``ConfigError`` where there are none."""
    if not len(samples):
        raise ConfigError("No drafted token was seen to be accepted or rejected, so there is no calibration.")
    confidence, accepted = samples.probability, samples.accepted
    table = reliability(confidence, accepted, bins)
    return Calibration(
        count=len(samples),
        confidence=float(confidence.mean()),
        acceptance=float(accepted.mean()),
        ece=_error(table),
        ece_equal_mass=expected_calibration_error(confidence, accepted, bins, equal_mass=True),
        brier=brier_score(confidence, accepted),
        log_loss=log_loss(confidence, accepted),
        bins=table,
    )


def calibration_json(samples: Samples, bins: int = BINS) -> dict[str, Any]:
    """The measures over all depths, and shortly for every depth, as the report has them."""
    whole = calibration_of(samples, bins)
    by_depth = []
    for depth in np.unique(samples.depth).tolist():
        values = asdict(calibration_of(samples.where(samples.depth == depth), bins))
        values.pop("bins")
        by_depth.append({"depth": depth, **values})
    return {**asdict(whole), "by_depth": by_depth}


def _bin(confidence: Floats, accepted: Booleans, low: float, high: float) -> Bin:
    return Bin(low, high, len(confidence), float(confidence.mean()), float(accepted.mean()))


def _error(table: Iterable[Bin]) -> float:
    rows = list(table)
    total = sum(row.count for row in rows)
    return sum(row.count * abs(row.acceptance - row.confidence) for row in rows) / total if total else 0.0
