"""The errors that cross module borders. Every message is a sentence that names the value."""

from __future__ import annotations


class Eagle2Error(Exception):
    """Base of all errors that eagle2 raises on purpose."""


class ModelError(Eagle2Error, ValueError):
    """A checkpoint that cannot be served: unknown architecture, tensors that do not fit."""


class ConfigError(Eagle2Error, ValueError):
    """A setting that cannot be used."""


class RequestError(Eagle2Error, ValueError):
    """A request that is the caller's fault. ``param`` names the field, ``code`` is for programs."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_request", status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders pickled; keyword-only fields need this to survive.
        return (_request_error, (self.message, self.param, self.code, self.status))


def _request_error(message: str, param: str | None, code: str, status: int) -> RequestError:
    return RequestError(message, param=param, code=code, status=status)


class OverloadedError(RequestError):
    """A request that comes at a bad time: 429. ``retry_after_s`` is when it may do better, in seconds."""

    def __init__(self, message: str, *, retry_after_s: float, code: str = "queue_full") -> None:
        super().__init__(message, code=code, status=429)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_overloaded_error, (self.message, self.retry_after_s, self.code))


def _overloaded_error(message: str, retry_after_s: float, code: str) -> OverloadedError:
    return OverloadedError(message, retry_after_s=retry_after_s, code=code)


class UnavailableError(Eagle2Error):
    """Nothing can serve the request now; trying again later may help."""


class DrainingError(UnavailableError):
    """A verifier that finishes what it has and takes nothing new; another one does."""


class LinkDownError(Eagle2Error):
    """The peer of a pair cannot be reached."""
