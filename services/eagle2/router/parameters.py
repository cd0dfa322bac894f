"""From a request's fields to sampling parameters and stop conditions, checked against the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from eagle2.errors import RequestError
from eagle2.protocol import ModelDescription, Priority, SamplingParams, StopConditions
from eagle2.router.schemas import GenerationBody


def sampling_params(body: GenerationBody, vocab_size: int, draw_seed: Callable[[], int]) -> SamplingParams:
    """The sampling of ``body``. A negative seed counts as its 64-bit two's complement; without one, one is drawn."""
    seed = draw_seed() if body.seed is None else body.seed
    bias = {int(token_id): value for token_id, value in body.logit_bias.items()}
    _check_ids("logit_bias", bias, vocab_size)
    return SamplingParams(
        seed=seed % 2**64,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(sorted(bias.items())),
    )


def stop_conditions(
    body: GenerationBody, prompt_ids: tuple[int, ...], model: ModelDescription, default_max_tokens: int | None
) -> StopConditions:
    """When the answer to a prompt of these ids ends.

    Raises RequestError when prompt and answer do not fit into the context, and for ids outside the vocabulary.
    """
    _check_ids("stop_token_ids", body.stop_token_ids, model.vocab_size)
    room = model.max_model_len - len(prompt_ids)
    if room < 1:
        raise RequestError(
            f"The prompt has {len(prompt_ids)} tokens, but the context of this model holds {model.max_model_len}, "
            "at least one of them for the answer.",
            param="messages" if hasattr(body, "messages") else "prompt",
            code="context_length_exceeded",
        )
    field, asked = _asked_tokens(body)
    if asked is None:
        asked = min(room, default_max_tokens or room)
    elif asked > room:
        raise RequestError(
            f"{field} is {asked} and the prompt has {len(prompt_ids)} tokens, but the context of this model holds "
            f"{model.max_model_len}.",
            param=field,
            code="context_length_exceeded",
        )
    return StopConditions(
        max_tokens=asked,
        stop_strings=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )


def priority_of(body: GenerationBody) -> Priority:
    """The class of a request: as named, else batch for OpenAI's tier of slow answers, else interactive."""
    return body.priority or ("batch" if body.service_tier == "flex" else "interactive")


def deadline_of(body: GenerationBody, most_s: float | None, now: float) -> float | None:
    """Unix time by which the answer must have ended: ``most_s`` from ``now`` on, or sooner where the client says so.

    most_s: what the operator allows; None is no bound.
    """
    given = [seconds for seconds in (body.timeout, most_s) if seconds is not None]
    return now + min(given) if given else None


def check_prompt_length(tokens: int, most: int, param: str) -> None:
    """Raises RequestError for a prompt of more than ``most`` tokens."""
    if tokens > most:
        raise RequestError(
            f"The prompt has {tokens} tokens, the most are {most}.", param=param, code="context_length_exceeded"
        )


def check_prompt_ids(prompt_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raises RequestError for a prompt without tokens or with an id outside the vocabulary."""
    if not prompt_ids:
        raise RequestError(f"{param}: the prompt is empty.", param=param, code="invalid_value")
    _check_ids(param, prompt_ids, vocab_size)


def _asked_tokens(body: GenerationBody) -> tuple[str, int | None]:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}; name one of them.",
            param="max_tokens",
            code="invalid_value",
        )
    return ("max_completion_tokens", new) if old is None else ("max_tokens", old)


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=-1)
    if largest >= vocab_size:
        raise RequestError(
            f"{param}: the token id {largest} is outside the vocabulary of {vocab_size} tokens.",
            param=param,
            code="invalid_value",
        )
