"""What a router sees of a verifier. No torch, no ray: routers run on CPU nodes."""

from eagle2.protocol.fleet import Fleet, Replica
from eagle2.protocol.generation import (
    Commit,
    ErrorCode,
    FinishReason,
    GenerationRequest,
    ModelDescription,
    Priority,
    SamplingParams,
    StopConditions,
    Usage,
    Verifier,
)

__all__ = [
    "Commit",
    "ErrorCode",
    "FinishReason",
    "Fleet",
    "GenerationRequest",
    "ModelDescription",
    "Priority",
    "Replica",
    "SamplingParams",
    "StopConditions",
    "Usage",
    "Verifier",
]
