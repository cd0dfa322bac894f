"""From a draft's confidence to the chance that its token is accepted: a temperature on the log-odds, for each depth.

A confidence p becomes sigmoid(logit(p) / T). This is temperature scaling (Guo et al. 2017, section 4.2) of the
yes-or-no question "is this token accepted": T above 1 draws confidences towards one half, below 1 away from it. The
order of siblings stays, so the map changes what a tree is expected to yield and not which token is the likeliest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle2.errors import ConfigError, ModelError
from eagle2.evaluation.calibration import SMALLEST, calibration_json, calibration_of
from eagle2.evaluation.observations import Booleans, Floats, Integers, Observations, Samples

CALIBRATION_FILE = "calibration.json"
_VERSION = 1
_RANGE = (0.1, 10.0)  # of a temperature: what lies outside comes of too few samples
_FEWEST = 100  # samples of a depth that has a temperature of its own


@dataclass(frozen=True, slots=True)
class Recalibration:
    """``by_depth[d - 1]`` is the temperature at depth d; deeper nodes have ``temperature``."""

    temperature: float
    by_depth: tuple[float, ...] = ()

    def probability(self, confidence: Floats, depth: Integers) -> Floats:
        """The chance that a token is accepted once its parent is. confidence (M,) in [0, 1], depth (M,) from 1 on."""
        by_depth = np.array([*self.by_depth, self.temperature])
        return _scaled(confidence, by_depth[np.minimum(depth - 1, len(self.by_depth))])

    def values(self, confidences: Floats) -> Floats:
        """The chance that a whole path is accepted: a product. confidences (N, D) by depth, NaN behind the node."""
        depth = np.arange(1, confidences.shape[1] + 1)
        columns = [self.probability(confidences[:, d - 1], np.full(len(confidences), d)) for d in depth.tolist()]
        values: Floats = np.nanprod(np.stack(columns, axis=1), axis=1)
        return values

    def steps(self, observations: Observations) -> Samples:
        samples = observations.steps()
        return replace(samples, probability=self.probability(samples.probability, samples.depth))

    def paths(self, observations: Observations) -> Samples:
        return replace(observations.paths(), probability=self.values(observations.confidences))


def fit_temperature(confidence: Floats, accepted: Booleans) -> float:
    """The temperature with the least log loss, between 0.1 and 10. Raises ``ConfigError`` without samples.

    The loss is convex in 1/T (it is logistic regression with one coefficient), so its slope is bisected.
    """
    if not len(confidence):
        raise ConfigError("A temperature cannot be fitted to no samples.")
    logits = _logit(confidence)

    def slope(inverse: float) -> float:
        return float(np.mean((_sigmoid(logits * inverse) - accepted) * logits))

    low, high = 1 / _RANGE[1], 1 / _RANGE[0]
    for _ in range(60):
        middle = (low + high) / 2
        if slope(middle) > 0:
            high = middle
        else:
            low = middle
    return 2 / (low + high)


def fit_recalibration(samples: Samples) -> Recalibration:
    """A temperature for all depths, and one for each depth with samples enough, up to the first without.

    Raises ``ConfigError`` without samples.
    """
    temperature = fit_temperature(samples.probability, samples.accepted)
    by_depth = []
    for depth in range(1, int(samples.depth.max()) + 1):
        own = samples.where(samples.depth == depth)
        if len(own) < _FEWEST:
            break
        by_depth.append(fit_temperature(own.probability, own.accepted))
    return Recalibration(temperature, tuple(by_depth))


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
            "after": calibration_json(half.steps(held_out)),
            "after_one_temperature": asdict(calibration_of(single.steps(held_out))),
            "paths_before": asdict(calibration_of(held_out.paths())),
            "paths_after": asdict(calibration_of(half.paths(held_out))),
        },
    }
    return report


def write_recalibrations(folder: Path, reports: Mapping[float, Mapping[str, Any]], measured: Mapping[str, Any]) -> Path:
    """``calibration.json`` beside a head: what ``calibration_report`` found, by sampling temperature.

    Acceptance depends on it: a greedy target takes a likely token more often than its probability says. ``measured``
    says on what it was found (prompts, tree, date). Raises ``ConfigError`` for a report without a recalibration.
    """
    entries = []
    for temperature, report in sorted(reports.items()):
        found = report["recalibration"]
        if found is None:
            raise ConfigError(f"At temperature {temperature:g} too little was observed for a recalibration.")
        held_out = found["held_out"]
        entries.append(
            {
                "sampling_temperature": temperature,
                "temperature": found["temperature"],
                "by_depth": list(found["by_depth"]),
                "trees": report["trees"],
                "held_out": {
                    key: _summary(held_out[key]) for key in ("before", "after", "paths_before", "paths_after")
                },
            }
        )
    values = {"version": _VERSION, "measured": dict(measured), "recalibrations": entries}
    path = folder / CALIBRATION_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def read_recalibration(folder: Path, sampling_temperature: float) -> Recalibration | None:
    """The recalibration beside a head that was found nearest to this sampling temperature; None without the file.

    Raises ``ModelError`` for a file that is not one of ``write_recalibrations``.
    """
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["version"] != _VERSION:
            raise ModelError(f"{path} has version {values['version']!r}, and {_VERSION} can be read.")
        entries = values["recalibrations"]
        nearest = min(entries, key=lambda entry: abs(float(entry["sampling_temperature"]) - sampling_temperature))
        temperatures = [float(nearest["temperature"]), *map(float, nearest["by_depth"])]
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is no recalibration of a draft head: {error!r}.") from None
    if not all(0 < temperature < float("inf") for temperature in temperatures):
        raise ModelError(f"{path} has a temperature that is not above 0: {temperatures}.")
    return Recalibration(temperatures[0], tuple(temperatures[1:]))


def _summary(calibration: Mapping[str, Any]) -> dict[str, Any]:
    return {key: calibration[key] for key in ("count", "ece", "ece_equal_mass", "brier", "log_loss")}


def _logit(probability: Floats) -> Floats:
    bounded = np.clip(probability, SMALLEST, 1 - SMALLEST)
    return np.log(bounded) - np.log1p(-bounded)


def _sigmoid(logits: Floats) -> Floats:
    return 0.5 * (1 + np.tanh(logits / 2))


def _scaled(probability: Floats, temperature: Floats) -> Floats:
    return _sigmoid(_logit(probability) / temperature)
