"""The bodies that clients send. Strict: an unknown field or a value out of range is refused by name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from eagle2.protocol import Priority

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 4096
MAX_MESSAGES = 4096
MAX_FIELDS = 128
MAX_TIMEOUT_S = 86_400
MIN_SEED = -(2**63)
MAX_SEED = 2**64 - 1
MAX_INT = 2**31 - 1


def _unicode(text: str) -> str:
    # JSON can spell half of a surrogate pair; such a string has no bytes and no tokens.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("lone_surrogate", "Strings must not hold a lone surrogate") from error
    return text


def _single(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text_part(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _text_only(kind: str) -> str:
    if kind != "text":
        raise PydanticCustomError(
            "unsupported_content",
            "unsupported content: only parts of type 'text' are served, not '{kind}'",
            {"kind": kind[:32]},
        )
    return kind


def _role(role: str) -> str:
    if role in ("tool", "function"):
        raise PydanticCustomError("unsupported", "Messages of role '{role}' are not served", {"role": role})
    if role not in ("system", "developer", "user", "assistant"):
        raise PydanticCustomError("invalid_role", "The role must be 'system', 'developer', 'user' or 'assistant'")
    return role


def _prompt(value: Any) -> str | tuple[int, ...]:
    """One prompt: a string or token ids, as it is or as the only item of a list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return _unicode(value)
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", "The prompt must be a string or a list of token ids")
    if value and all(isinstance(item, str | list) for item in value):
        raise PydanticCustomError(
            "unsupported",
            "One request carries one prompt, but {count} were given; send a request for each",
            {"count": len(value)},
        )
    if not all(type(item) is int and 0 <= item <= MAX_INT for item in value):
        raise PydanticCustomError("prompt_type", "Every item of a prompt given as a list must be a token id")
    return tuple(value)


def _logit_bias(value: dict[str, float]) -> dict[int, float]:
    ids = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise PydanticCustomError("logit_bias_key", "Every key must be a token id in decimal digits")
        if not -100 <= bias <= 100:
            raise PydanticCustomError(
                "logit_bias_value", "The bias of token {id} must lie between -100 and 100", {"id": int(key)}
            )
        ids[int(key)] = bias
    return ids


def _top_k(value: int) -> int:
    return 0 if value == -1 else value


def _only(*allowed: Any, why: str) -> PlainValidator:
    """A field that clients may send, but only with a value that changes nothing."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(item) and value == item for item in allowed):
            raise PydanticCustomError("unsupported", "{why}", {"why": why})
        return value

    return PlainValidator(check)


Text = Annotated[str, AfterValidator(_unicode)]
StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
MaxTokens = Annotated[int | None, Field(ge=1, le=MAX_INT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Label = Annotated[Text, Field(max_length=512)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:  # an error is kept for every unknown field; a hostile body has many
            raise PydanticCustomError(
                "too_many_fields", "An object has {count} fields, the most are {most}", _count(len(value), MAX_FIELDS)
            )
        return {key: item for key, item in value.items() if item is not None or key not in cls.model_fields}


def _count(count: int, most: int) -> dict[str, int]:
    return {"count": count, "most": most}


class StreamOptions(_Body):
    """Options of a stream. ``include_usage`` adds one last chunk with the counts."""

    include_usage: bool = False
    include_obfuscation: Annotated[bool, _only(False, why="Padding of chunks is not served")] = False


class ContentPart(_Body):
    """One part of a message; only text is served."""

    type: Annotated[str, AfterValidator(_text_only)]
    text: Text


class Message(_Body):
    """One message. The fields after ``name`` are those of an answer sent back; they must be empty."""

    role: Annotated[str, AfterValidator(_role)]
    content: Annotated[
        list[ContentPart], Field(min_length=1, max_length=MAX_MESSAGES), FailFast(), BeforeValidator(_text_part)
    ]
    name: Label | None = None
    refusal: Annotated[Any, _only(why="Refusals sent back are not served")] = None
    annotations: Annotated[Any, _only([], why="Annotations are not served")] = None
    audio: Annotated[Any, _only(why="Audio is not served")] = None
    tool_calls: Annotated[Any, _only([], why="Tool calls are not served")] = None
    function_call: Annotated[Any, _only(why="Function calls are not served")] = None

    @property
    def text(self) -> str:
        """The text parts, joined by line feeds."""
        return "\n".join(part.text for part in self.content)


class GenerationBody(_Body):
    """What both ways to ask for text share. docs/reference/http-api.md describes every field."""

    model: Text | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT), AfterValidator(_top_k)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int | None, Field(ge=MIN_SEED, le=MAX_SEED)] = None
    stop: Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS), FailFast(), BeforeValidator(_single)] = Field(
        default_factory=list
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS), FailFast()] = Field(
        default_factory=list
    )
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    logit_bias: Annotated[
        dict[str, float], Field(max_length=MAX_LOGIT_BIAS), FailFast(), AfterValidator(_logit_bias)
    ] = Field(default_factory=dict)
    ignore_eos: bool = False
    speculation: bool = True
    priority: Priority | None = None
    timeout: Annotated[float | None, Field(gt=0, le=MAX_TIMEOUT_S)] = None
    return_token_ids: bool = False
    n: Annotated[Any, _only(1, why="Only one choice (n = 1) is served")] = 1
    user: Label | None = None
    session_id: Label | None = None
    metadata: Annotated[dict[Label, Label], Field(max_length=16), FailFast()] = Field(default_factory=dict)
    store: bool = False
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    logprobs: Annotated[Any, _only(False, why="Log-probabilities are not served")] = False
    top_logprobs: Annotated[Any, _only(0, why="Log-probabilities are not served")] = 0
    tools: Annotated[Any, _only([], why="Tools are not served")] = None
    tool_choice: Annotated[Any, _only("none", why="Tools are not served")] = None
    parallel_tool_calls: bool = True
    functions: Annotated[Any, _only([], why="Functions are not served")] = None
    function_call: Annotated[Any, _only("none", why="Functions are not served")] = None
    response_format: Annotated[Any, _only({"type": "text"}, why="Only the format 'text' is served")] = None
    modalities: Annotated[Any, _only(["text"], why="Only the modality 'text' is served")] = None
    audio: Annotated[Any, _only(why="Audio is not served")] = None


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], PlainValidator(_prompt)]
    logprobs: Annotated[Any, _only(why="Log-probabilities are not served")] = None
    suffix: Annotated[Any, _only(why="A suffix is not served")] = None
    echo: Annotated[Any, _only(False, why="Echoing the prompt is not served")] = False
    best_of: Annotated[Any, _only(1, why="Only one choice (best_of = 1) is served")] = 1
