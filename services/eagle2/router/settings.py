"""The limits of the HTTP layer."""

from __future__ import annotations

from dataclasses import dataclass

from eagle2.config import Settings
from eagle2.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What an operator may set of the HTTP layer. Times are in seconds, sizes in bytes.

    ``model_name`` replaces the name that the verifier gives. ``default_max_tokens`` bounds answers whose request
    names no bound; None lets them run to the end of the context. ``max_prompt_tokens`` is the longest prompt, whatever
    the model takes. ``request_timeout_s`` is the most that an answer may take; clients can only lower it. Bodies of up
    to ``inline_body_bytes`` are parsed on the event loop, others in a thread, those above ``large_body_bytes`` in
    another one. A write that does not drain in ``slow_reader_timeout_s`` ends its generation.
    """

    model_name: str | None = None
    default_max_tokens: int | None = None
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompt_tokens: int = 8192
    body_timeout_s: float = 30.0
    slow_reader_timeout_s: float = 30.0
    request_timeout_s: float | None = None
    probe_timeout_s: float = 2.0
    describe_timeout_s: float = 30.0
    close_timeout_s: float = 5.0
    inline_body_bytes: int = 4 * 1024
    large_body_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        """Raises ConfigError where a limit is not positive."""
        for name in (
            "default_max_tokens",
            "max_body_bytes",
            "max_prompt_tokens",
            "body_timeout_s",
            "slow_reader_timeout_s",
            "request_timeout_s",
            "probe_timeout_s",
            "describe_timeout_s",
            "close_timeout_s",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"The router's {name} must be above 0, not {value!r}.")
        if self.model_name == "":
            raise ConfigError("The router's model_name must not be empty.")

    @classmethod
    def of(cls, settings: Settings) -> RouterSettings:
        """What the operator's ``settings`` say of the HTTP layer."""
        http = settings.http
        return cls(
            model_name=settings.model.served_model_name,
            default_max_tokens=http.default_max_tokens,
            max_body_bytes=http.max_body_bytes,
            max_prompt_tokens=http.max_prompt_tokens,
            request_timeout_s=http.request_timeout_s,
        )
