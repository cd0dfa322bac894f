"""Training examples: conversations as token ids, and which of those ids the target wrote."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from eagle2.errors import Eagle2Error, RequestError
from eagle2.text.chat import ChatTemplate
from eagle2.text.tokenizer import Tokenizer

Message = Mapping[str, str]
ROLES = ("system", "user", "assistant")


class DataError(Eagle2Error, ValueError):
    """A data file that cannot be trained on. The message names the file and the line."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One conversation. ``spans`` are the half-open ranges of ``ids`` that an assistant wrote, ascending.

    ids: (T,) int32. int32 because all examples stay in memory at once.
    """

    ids: NDArray[np.int32]
    spans: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_answer_tokens(self) -> int:
        """How many ids the assistant wrote."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Text to the ids that the target sees in a chat. ``template`` None: turns are encoded as plain text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    @classmethod
    def from_folder(cls, folder: Path) -> ChatEncoder:
        """Read tokenizer and chat template of a checkpoint. Raises ``ModelError`` where there is no tokenizer."""
        return cls(Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder))

    def example(self, messages: Sequence[Message]) -> Example:
        """Encode a conversation; every assistant turn is trained on where the template keeps earlier turns as they are.

        Raises ``ValueError`` for a conversation without an answer.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("no message has the role 'assistant'")
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for i in turns:
            prefix = self.prompt(messages[:i])
            if prefix[: len(ids)] != ids:
                # Some templates rewrite earlier turns (they drop a thought, say): such turns never stand in a prompt.
                spans.clear()
            answer = self.tokenizer.encode(messages[i]["content"], add_special_tokens=False)
            ids = prefix + answer + self._end()
            spans.append((len(prefix), len(ids)))
        return Example(np.asarray(ids, dtype=np.int32), tuple(spans))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids that the target reads before it answers; ``messages`` end with the user's."""
        if self.template is None:
            text = "\n".join(message["content"] for message in messages)
            return self.tokenizer.encode(text, add_special_tokens=True)
        return self.tokenizer.encode(self.template.render(messages), add_special_tokens=False)

    def _end(self) -> list[int]:
        eos = self.template.eos_token if self.template is not None else None
        found = self.tokenizer.token_id(eos) if eos is not None else None
        return [] if found is None else [found]


def read_examples(
    path: Path, vocab_size: int, encoder: Callable[[], ChatEncoder], max_length: int = 2048
) -> list[Example]:
    """Read a ``.jsonl`` or ``.jsonl.gz`` file, one example a line, cut to ``max_length`` tokens.

    A line has ``prompt_ids`` and ``response_ids``, or ``prompt`` and ``response``, or ``messages`` (or
    ``conversations`` as ShareGPT writes them), looked for in that order. ``encoder`` is called once, and only if a line
    holds text.
    Blank lines are skipped, and so are conversations whose answer lies behind ``max_length``.

    Raises ``DataError`` for the first line that is broken, and for a file without examples.
    """
    examples: list[Example] = []
    made: list[ChatEncoder] = []

    def encode(messages: Sequence[Message]) -> Example:
        if not made:
            made.append(encoder())
        return made[0].example(messages)

    for number, line in numbered_lines(path):
        try:
            example = _cut(_parse(line, encode), max_length)
            if example is not None and not 0 <= int(example.ids.min()) <= int(example.ids.max()) < vocab_size:
                worst = max(example.ids, key=lambda i: abs(int(i) - vocab_size // 2))
                raise ValueError(f"token id {int(worst)} is not in the target's vocabulary of {vocab_size}")
        except (ValueError, RequestError) as error:
            raise DataError(f"{path}, line {number}: {error}.") from error
        if example is not None:
            examples.append(example)
    if not examples:
        raise DataError(f"{path} holds no example with an answer within {max_length} tokens.")
    return examples


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a ``.jsonl`` or ``.jsonl.gz`` file that are not blank, and their numbers from 1 on.

    Raises ``DataError`` where the file cannot be read to its end, or a line is no UTF-8 text.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8")
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 text ({error.reason}).") from error
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path} cannot be read after line {number}: {reason}.") from error


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def json_object(line: str) -> dict[str, Any]:
    """What a line holds. Raises ``ValueError`` where that is no JSON object."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} where an object is expected")
    return value


def _parse(line: str, encode: Callable[[Sequence[Message]], Example]) -> Example:
    value = json_object(line)
    if "prompt_ids" in value or "response_ids" in value:
        prompt, response = (_ids(value, key) for key in ("prompt_ids", "response_ids"))
        ids = np.asarray(prompt + response, dtype=np.int64)
        if len(ids) and abs(ids).max() >= 2**31:
            raise ValueError(f"token id {abs(ids).max()} is not a token id")
        return Example(ids.astype(np.int32), ((len(prompt), len(ids)),))
    if "prompt" in value or "response" in value:
        question, answer = (_text(value, key) for key in ("prompt", "response"))
        return encode([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    if "messages" in value or "conversations" in value:
        return encode(parsed_messages(value.get("messages", value.get("conversations"))))
    raise ValueError("none of prompt_ids and response_ids, prompt and response, messages is there")


def _ids(value: Mapping[str, Any], key: str) -> list[int]:
    found = value.get(key)
    if not isinstance(found, list) or not all(type(i) is int for i in found):
        raise ValueError(f"{key} must be a list of token ids")
    if not found:
        raise ValueError(f"{key} is empty")
    return found


def _text(value: Mapping[str, Any], key: str) -> str:
    found = value.get(key)
    if not isinstance(found, str):
        raise ValueError(f"{key} must be a text, not {found!r}")
    return found


def parsed_messages(value: object) -> list[Message]:
    """A conversation with ``role`` and ``content``, or as ShareGPT writes it. ``ValueError`` for anything else."""
    if not isinstance(value, list):
        raise ValueError("messages must be a list")
    sharegpt = {"human": "user", "gpt": "assistant", "system": "system"}
    messages: list[Message] = []
    for entry in value:
        if not isinstance(entry, dict):
            raise ValueError("each message must be an object with role and content")
        role = entry.get("role", sharegpt.get(str(entry.get("from"))))
        content = entry.get("content", entry.get("value"))
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(f"a message has the role {role!r}; roles are {', '.join(ROLES)}, and content is a text")
        messages.append({"role": role, "content": content})
    return messages


def _cut(example: Example, max_length: int) -> Example | None:
    """The first ``max_length`` tokens, or None where no answer is left to train on."""
    ids = example.ids[:max_length]
    spans = tuple((start, min(stop, len(ids))) for start, stop in example.spans if start < len(ids))
    return Example(ids, spans) if spans else None
