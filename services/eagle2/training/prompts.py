"""Prompts that the target is to answer: a file of questions, checked to its last line before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle2.errors import RequestError
from eagle2.training.data import DataError, Message, json_object, numbered_lines, parsed_messages


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. ``text`` is the user's last message, ``ids`` all that the target reads, template included."""

    text: str
    ids: tuple[int, ...]


def read_prompts(path: Path, encode: Callable[[Sequence[Message]], list[int]]) -> list[Prompt]:
    """Read a ``.jsonl`` or ``.jsonl.gz`` file, one prompt a line, each different prompt once, in the file's order.

    A line has ``prompt`` (a text), or ``turns`` (the user's texts, of which the first is taken, since no answer stands
    between them), or ``messages`` (or ``conversations``) that end with the user's, looked for in that order; other keys
    are ignored. ``encode`` turns messages into the ids that the target reads. Blank lines are skipped.

    Raises ``DataError`` for the first line that is broken, and for a file without prompts.
    """
    prompts: dict[tuple[int, ...], Prompt] = {}
    for number, line in numbered_lines(path):
        try:
            messages = _parse(line)
            ids = tuple(encode(messages))
            if not ids:
                raise ValueError("the prompt has no tokens")
        except (ValueError, RequestError) as error:
            raise DataError(f"{path}, line {number}: {str(error).rstrip('.')}.") from error
        prompts.setdefault(ids, Prompt(messages[-1]["content"], ids))
    if not prompts:
        raise DataError(f"{path} holds no prompts.")
    return list(prompts.values())


def _parse(line: str) -> list[Message]:
    value = json_object(line)
    if "prompt" in value:
        return [_question(value["prompt"], "prompt")]
    if "turns" in value:
        turns = value["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("turns must be a list of texts with at least one in it")
        return [_question(turns[0], "the first of turns")]
    if "messages" in value or "conversations" in value:
        messages = parsed_messages(value.get("messages", value.get("conversations")))
        if not messages or messages[-1]["role"] != "user":
            raise ValueError("the last of messages must be the user's: it is what the target answers")
        return messages
    raise ValueError("none of prompt, turns, messages is there")


def _question(value: object, name: str) -> Message:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text that is not empty, not {value!r}")
    return {"role": "user", "content": value}
