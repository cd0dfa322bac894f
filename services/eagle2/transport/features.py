"""Features in another dtype: by value, never by reinterpreting bytes, never past what the dtype can hold."""

from __future__ import annotations

import torch


class FeatureRangeError(ValueError):
    """A finite feature that the wanted dtype could only hold as an infinity."""


def features_as(features: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``features`` (any shape) converted by value to ``dtype``; the same tensor when it has that dtype already.

    NaN and infinities stay what they are: whoever runs the draft head looks for them anyway. Raises
    ``FeatureRangeError`` for a finite value that does not fit (70000 in float16, whose largest number is 65504), since
    an infinity made here would spread through the head's cache, and ``ValueError`` for features that are no floats.
    """
    if not features.dtype.is_floating_point:
        raise ValueError(f"features are floating-point numbers, not {features.dtype}")
    if features.dtype == dtype:
        return features
    converted = features.to(dtype)
    if torch.finfo(features.dtype).max > torch.finfo(dtype).max:
        lost = converted.isinf() & features.isfinite()
        if bool(lost.any()):
            worst = features[lost].abs().max().item()
            limit = torch.finfo(dtype).max
            raise FeatureRangeError(f"a feature of magnitude {worst:g} does not fit {dtype}, which ends at {limit:g}")
    return converted
