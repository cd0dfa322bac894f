"""The weights of a checkpoint, and whether a draft head fits a target."""

from __future__ import annotations

from eagle2.models.architecture import DraftConfig, RopeConfig, TargetConfig

__all__ = ["DraftConfig", "RopeConfig", "TargetConfig"]
