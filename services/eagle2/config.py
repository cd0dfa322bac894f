"""What can be set, parsed once at the edge: flags over environment over file over defaults.

``load_settings`` is the edge. What it returns is frozen and composed; nobody below reads the environment or a file.
An environment variable names its section and its setting: ``EAGLE2_ENGINE__MAX_SEQUENCES=4``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError, with_config
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from eagle2.errors import ConfigError

EMBEDDED = "embedded"
ENV_PREFIX = "EAGLE2_"
_STRICT = ConfigDict(extra="forbid")

DType = Literal["auto", "bfloat16", "float16", "float32"]
TreeBudget = Literal["fixed", "adaptive"]
Overlap = Literal["auto", "on", "off"]
VocabularySize = int | Literal["auto", "all"]


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)


def _at_least(section: object, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(value is None or value >= minimum, f"{name} must be at least {minimum:g}, not {value}.")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which networks are served. ``embedded`` is the model that the package brings along.

    ``target`` and ``draft`` are a folder, a hub id, a GGUF file (target only) or ``embedded``; ``draft`` None
    serves without speculation. ``draft_vocabulary`` is how many of the most frequent tokens the head scores; ``auto``
    takes the table that lies with the head, if one does. ``max_model_len`` None is what the checkpoint says.
    """

    target: str = EMBEDDED
    draft: str | None = EMBEDDED
    draft_vocabulary: VocabularySize = "auto"
    served_model_name: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 2, "max_model_len")
        if isinstance(self.draft_vocabulary, int):
            _at_least(self, 1, "draft_vocabulary")
        _require(bool(self.target), "target must name a model, not ''.")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a verifier runs. ``kv_slots`` None is sized from the device's memory, ``threads`` None is torch's choice.

    ``depth``, ``top_k`` and ``num_draft_tokens`` bound the tree of one sequence (paper section 4.1); the root is
    not counted. ``tree_budget`` says whether every step has trees that are chosen within those bounds by what they cost
    and yield, or always the largest. ``prefix_cache`` keeps what was read for later requests of the same tenant that
    begin alike.
    A step takes up to ``prefill_chunk`` prompt tokens; while interactive requests decode, only so many that it should
    end within ``max_token_gap_s``, None for no bound. ``overlap`` has the proposer draft for one half of the batch
    while the other half is verified: always, never, or where that was measured to pay. ``draft_timeout_s`` is how long
    a step waits for trees before it decodes plainly.
    """

    max_sequences: int = 8
    kv_slots: int | None = None
    prefill_chunk: int = 256
    max_token_gap_s: float | None = 0.2
    prefix_cache: bool = True
    depth: int = 4
    top_k: int = 10
    num_draft_tokens: int = 24
    tree_budget: TreeBudget = "adaptive"
    overlap: Overlap = "auto"
    draft_timeout_s: float = 2.0
    threads: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_sequences", "prefill_chunk", "depth", "top_k", "num_draft_tokens", "threads")
        _at_least(self, 16, "kv_slots")
        _at_least(self, 0.001, "draft_timeout_s", "max_token_gap_s")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class PairSettings:
    """How a verifier finds its proposer. ``socket_dir`` None is a folder of the system's temporary directory.

    ``pair_wait_s`` bounds one search for a free proposer on the node, ``retry_s`` is the pause between searches.
    """

    socket_dir: str | None = None
    pair_wait_s: float = 2.0
    retry_s: float = 0.2

    def __post_init__(self) -> None:
        _at_least(self, 0.01, "pair_wait_s", "retry_s")
        # The path of a Unix socket has at most 107 bytes; its name takes up to 32 of them.
        _require(
            len(os.fsencode(self.socket_dir or "")) <= 75,
            f"socket_dir must be at most 75 bytes long, not {self.socket_dir}.",
        )


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where the HTTP API listens, and what it allows.

    ``default_max_tokens`` bounds answers whose request names no bound; None lets them run to the end of the context.
    ``request_timeout_s`` becomes the deadline of a generation; None sets none. ``max_prompt_tokens`` and
    ``max_body_bytes`` are what a request may have at most.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    default_max_tokens: int | None = None
    request_timeout_s: float | None = None
    max_prompt_tokens: int = 8192
    max_body_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        _require(0 < self.port < 65536, f"port must lie between 1 and 65535, not {self.port}.")
        _at_least(self, 1, "default_max_tokens", "max_prompt_tokens", "max_body_bytes")
        _at_least(self, 0.001, "request_timeout_s")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Where it is kept which verifier holds which conversation.

    ``store`` is ``memory://`` for one router, ``redis://``, ``rediss://`` or
    ``redis+sentinel://host:port,host:port/service/db`` for several. A session is forgotten ``ttl_s`` after its last
    use. A request waits ``timeout_s`` for the store at most and goes on without it; a store that fails is left alone
    for ``retry_s``.
    """

    store: str = "memory://"
    ttl_s: float = 3600.0
    timeout_s: float = 0.1
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        _at_least(self, 0.001, "ttl_s", "timeout_s", "retry_s")
        schemes = ("memory://", "redis://", "rediss://", "redis+sentinel://", "rediss+sentinel://")
        # The URL may hold a password, which does not belong into a message.
        scheme = self.store.partition("://")[0]
        _require(self.store.startswith(schemes), f"store must begin with one of {', '.join(schemes)}, not {scheme}.")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Which verifier a request goes to, and what happens when that one fails.

    ``affinity`` "session" sends a conversation to where its KV cache is, "random" anywhere (to measure what the former
    gains). A replica with more than ``load_bound`` times the mean load (and no free place) is passed over even then. A
    stream of which nothing comes for ``progress_timeout_s`` goes on elsewhere; one request is tried ``max_attempts``
    times, and retries are at most ``retry_share`` of all requests in the long run, ``retry_burst`` on top. A request
    that was interrupted waits ``failover_wait_s`` for another replica, 0 when there will never be one. A request that
    has crashed two replicas is refused for ``quarantine_s``. A stream whose replica is to stop has ``drain_s`` to end
    there, then it goes on elsewhere; Serve's ``graceful_shutdown_timeout_s`` of the verifiers must be above that.
    """

    affinity: Literal["session", "random"] = "session"
    load_bound: float = 1.25
    progress_timeout_s: float = 30.0
    max_attempts: int = 4
    retry_share: float = 0.2
    retry_burst: int = 64
    failover_wait_s: float = 30.0
    quarantine_s: float = 600.0
    drain_s: float = 20.0

    def __post_init__(self) -> None:
        _at_least(self, 1, "load_bound", "max_attempts")
        _at_least(self, 0.001, "progress_timeout_s", "quarantine_s")
        _at_least(self, 0, "retry_share", "retry_burst", "failover_wait_s", "drain_s")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """How many requests wait in a router: ``max_queued`` at most, and none that would wait above ``max_wait_s``.

    Interactive requests come first; while both kinds wait, ``batch_share`` of the work is that of batch requests. When
    no verifier is left, requests wait ``ready_grace_s`` for one to come back before they are refused.
    """

    max_queued: int = 1024
    max_wait_s: float = 60.0
    batch_share: float = 0.1
    ready_grace_s: float = 10.0

    def __post_init__(self) -> None:
        _at_least(self, 0, "max_queued", "ready_grace_s")
        _at_least(self, 0.001, "max_wait_s")
        _require(0 < self.batch_share < 1, f"batch_share must lie between 0 and 1, not {self.batch_share}.")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class TenantSettings:
    """Who may ask, and how much. ``keys_file`` (an absolute path) None serves everybody, without limits.

    ``requests_per_minute`` and ``tokens_per_minute`` (prompt and answer) hold for each key that has no limits of its
    own in the file; None for no limit.
    """

    keys_file: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "requests_per_minute", "tokens_per_minute")
        path = self.keys_file
        # Services do not run in the folder where the setting was written.
        _require(path is None or os.path.isabs(path), f"keys_file must be an absolute path, not {path!r}.")  # noqa: PTH117
        for name in ("requests_per_minute", "tokens_per_minute"):
            _require(path is not None or getattr(self, name) is None, f"{name} counts by key, so it needs a keys_file.")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set, by section."""

    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    session: SessionSettings = field(default_factory=SessionSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    tenants: TenantSettings = field(default_factory=TenantSettings)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values by section and name, as ``load_settings`` takes them back."""
        return asdict(self)


_SECTIONS = {f.name: f.default_factory for f in fields(Settings)}


def load_settings(
    values: Mapping[str, Any] | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: bool = False,
) -> Settings:
    """Settings from a file's ``values``, the environment (when ``environ``) and a command line's ``flags``.

    Both mappings are nested: section, then name. Raises ``ConfigError`` with a sentence that names the setting.
    """

    class Edge(BaseSettings):
        model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid")

        model: ModelSettings = ModelSettings()
        engine: EngineSettings = EngineSettings()
        pair: PairSettings = PairSettings()
        http: HttpSettings = HttpSettings()
        session: SessionSettings = SessionSettings()
        routing: RoutingSettings = RoutingSettings()
        admission: AdmissionSettings = AdmissionSettings()
        tenants: TenantSettings = TenantSettings()

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file_settings = InitSettingsSource(settings_cls, init_kwargs=dict(values or {}))
            return (init_settings, env_settings, file_settings) if environ else (init_settings, file_settings)

    if environ:
        _refuse_unknown_variables(os.environ)
    try:
        edge = Edge(**dict(flags or {}))
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None
    return Settings(**{section: getattr(edge, section) for section in _SECTIONS})


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """A misspelt section would be ignored silently; a misspelt name is found by the model itself."""
    for variable in environ:
        section, delimiter, _ = variable.removeprefix(ENV_PREFIX).partition("__")
        if variable.startswith(ENV_PREFIX) and delimiter and section.lower() not in _SECTIONS:
            raise ConfigError(f"{variable} sets nothing: the sections are {', '.join(_SECTIONS)}.")


def _sentence(error: ValidationError) -> str:
    errors = error.errors()
    first = errors[0]
    # Section and name; behind them stands which kind of value was tried, where a setting takes several.
    path = ".".join(str(part) for part in first["loc"][:2])
    match first["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            section = _SECTIONS.get(str(first["loc"][0])) if len(first["loc"]) > 1 else Settings
            known = ", ".join(f.name for f in fields(section)) if section else ""  # type: ignore[arg-type]
            return f"{path} is not a setting; known here are {known}."
        case "value_error":
            return f"{path}: {first['ctx']['error']}" if path else str(first["ctx"]["error"])
        case _:
            reasons = "; ".join(e["msg"] for e in errors if e["loc"][:2] == first["loc"][:2])
            return f"{path} cannot be {first['input']!r}: {reasons}."
