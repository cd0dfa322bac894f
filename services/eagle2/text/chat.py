"""Chat templates: messages to the text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eagle2.errors import ModelError, RequestError


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training; for a prompt it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models have not seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """A Jinja template with the functions and filters that ``transformers`` gives it, in a sandbox."""

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        """Raises ``ModelError`` where ``source`` is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"The chat template cannot be read: {error}.") from error
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        # Absent tokens stay undefined, which a template writes as nothing; None would be written as a word.
        self._tokens = {name: token for name, token in tokens.items() if token is not None}

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """Read ``chat_template.jinja`` or ``tokenizer_config.json`` of a checkpoint folder; None without a template."""
        config = _tokenizer_config(folder)
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else _default_template(config.get("chat_template"))
        if source is None:
            return None
        return cls(source, *special_tokens(folder))

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Text of ``messages``; ``add_generation_prompt`` opens the assistant's turn.

        Raises ``RequestError`` where the template rejects the messages.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # a template can fail in any way that its expressions can
            raise RequestError(f"The chat template rejects these messages: {error}", param="messages") from error


def special_tokens(folder: Path) -> tuple[str | None, str | None]:
    """The text of the beginning-of-sequence and end-of-sequence tokens that ``tokenizer_config.json`` names."""
    config = _tokenizer_config(folder)
    bos, eos = (_token_text(config.get(key)) for key in ("bos_token", "eos_token"))
    return bos, eos


def _token_text(value: object) -> str | None:
    # Older files write a token as an object with its matching rules.
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    return value if isinstance(value, dict) else {}


def _default_template(value: object) -> str | None:
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
