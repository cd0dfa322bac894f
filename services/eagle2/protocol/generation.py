"""One generation as it crosses from a router to a verifier and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "error"]
Priority = Literal["interactive", "batch"]
"""``interactive``: somebody waits for the answer. ``batch``: nobody does, and it may take longer."""
ErrorCode = Literal["generation_failed", "deadline_exceeded", "verifier_failed", "verifier_stopped"]
"""The last two are no fault of the generation, which another verifier may go on with: its engine has failed, or was
stopped."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target picks a token. Applied in this order: penalties and bias, temperature, top_k, top_p, min_p.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` is an unsigned 64-bit
    number and always set: the router draws one where the client named none, so that a stream can be continued
    by another verifier.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a generation ends. Nothing after the cut stays in text, ids, usage or cache.

    ``max_tokens`` counts all output tokens, those of ``GenerationRequest.output_ids`` included.
    """

    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Everything that a verifier needs, also to go on with a stream that another one began.

    ``output_ids`` are the tokens already sent to the client and ``characters_released`` the length of the text
    already sent; both are empty on a first attempt. ``deadline`` is a Unix time in seconds; a generation that has not
    ended by then ends in an error.
    """

    request_id: str
    tenant: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    speculation: bool = True
    output_ids: tuple[int, ...] = ()
    characters_released: int = 0
    deadline: float | None = None
    attempt: int = 0
    priority: Priority = "interactive"


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one generation. ``accepted`` and ``rejected`` count drafted tokens, the bonus in neither."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    cycles: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """One item of a stream: the tokens of one commit and the text that they release.

    The text may lag behind the ids (an unfinished character, a possible start of a stop string). The last item
    has ``finish_reason`` and ``usage``; an ``error`` says why in ``error``, and in ``error_code`` for programs.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    error_code: ErrorCode | None = None


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a router must know of the model to turn messages into token ids."""

    name: str
    created: int
    vocab_size: int
    max_model_len: int
    dtype: str
    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    speculation: bool


class Verifier(Protocol):
    """A verifier as a router sees it: in the same process, or behind a Serve handle."""

    async def describe(self) -> ModelDescription: ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        """Stream one generation. Closing the iterator (or cancelling its reader) ends the decoding.

        Raises ``RequestError`` for a request that does not fit the model, ``UnavailableError`` when not serving.
        """
        ...

    async def stats(self) -> dict[str, float]:
        """Counters and gauges by metric name (``telemetry/metrics.py``)."""
        ...
