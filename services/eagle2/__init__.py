"""EAGLE-2 speculative decoding with the drafter and the verifier in separate Ray Serve deployments."""

from __future__ import annotations

__version__ = "0.1.0"
