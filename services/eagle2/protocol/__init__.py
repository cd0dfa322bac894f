"""What a router sees of a verifier. No torch, no ray: routers run on CPU nodes."""

from eagle2.protocol.generation import (
    Commit,
    FinishReason,
    GenerationRequest,
    ModelDescription,
    SamplingParams,
    StopConditions,
    Usage,
    Verifier,
)

__all__ = [
    "Commit",
    "FinishReason",
    "GenerationRequest",
    "ModelDescription",
    "SamplingParams",
    "StopConditions",
    "Usage",
    "Verifier",
]
