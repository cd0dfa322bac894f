"""The target's own answers: a file that grows by whole lines, and that a killed run goes on with."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from eagle2.config import EngineSettings, Settings
from eagle2.engine.assemble import Checkpoint, num_slots
from eagle2.errors import ConfigError
from eagle2.training.checkpoint import write_atomically
from eagle2.training.data import DataError
from eagle2.training.decoder import BatchDecoder, Completion, Task
from eagle2.training.prompts import Prompt

Report = Callable[[float, float, str], None]
"""Takes answers done, answers in all, and a note."""

_SYNC_S = 10.0  # what a power cut may cost, at most; a kill costs nothing that is written


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How prompts are answered. Each prompt gets one of ``temperatures``, 0 for greedy, by a hash of it and ``seed``.

    ``max_tokens`` bounds an answer; prompts above ``max_prompt_tokens`` are left out.
    """

    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 0.8)
    max_tokens: int = 256
    max_prompt_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not self.temperatures or not all(0 <= value < float("inf") for value in self.temperatures):
            raise ConfigError(f"temperatures must be numbers from 0 on, not {list(self.temperatures)}.")

    def task(self, prompt: Prompt) -> Task:
        """The work that a prompt is: what is drawn for it depends on its ids and the seed, not on its place."""
        digest = hashlib.blake2b(f"{self.seed} {prompt.ids}".encode(), digest_size=16).hexdigest()
        temperature = self.temperatures[int(digest, 16) % len(self.temperatures)]
        return Task(prompt.ids, self.max_tokens, temperature, digest)


@dataclass(frozen=True, slots=True)
class AnswerCount:
    """answered: lines of the file that belong to the prompts. too_long: prompts that were left out."""

    answered: int
    too_long: int


def answer_prompts(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    out: Path,
    settings: AnswerSettings,
    *,
    sequences: int = 64,
    report: Report | None = None,
) -> AnswerCount:
    """Have the target answer each prompt once; answers are appended to ``out`` as they end, in no set order.

    A line is what ``read_examples`` takes: prompt, response, prompt_ids, response_ids, temperature, finish. Prompts
    that ``out`` has answers to already are not asked again, so that the same call goes on where a killed one was.
    ``sequences`` are decoded at once: more are faster and take more memory, and the answers stay the same.

    Raises ``ConfigError`` where ``out`` was made with another target or other settings, or is being written by another
    process, and ``DataError`` where it holds a broken line.
    """
    longest = min(settings.max_prompt_tokens, checkpoint.max_model_len - settings.max_tokens)
    if longest < 1:
        raise ConfigError(
            f"Answers of {settings.max_tokens} tokens leave no room for a prompt in the target's context of "
            f"{checkpoint.max_model_len} tokens."
        )
    asked = [prompt for prompt in prompts if len(prompt.ids) <= longest]
    with AnswerFile.opened(out, _made_with(checkpoint, settings)) as file:
        waiting = [prompt for prompt in asked if prompt.ids not in file.answered]
        done, total = len(asked) - len(waiting), len(asked)
        if report is not None:
            report(done, total, "")
        if waiting:
            texts = {prompt.ids: prompt.text for prompt in waiting}
            decoder = BatchDecoder(
                checkpoint, sequences=sequences, slots=_slots(checkpoint, waiting, settings, sequences)
            )
            began = time.monotonic()
            for completion in decoder.run(settings.task(prompt) for prompt in waiting):
                response = checkpoint.tokenizer.decode(completion.output_ids)
                file.append(completion, texts[completion.task.prompt_ids], response)
                done += 1
                rate = decoder.num_generated / max(time.monotonic() - began, 1e-9)
                if report is not None:
                    report(done, total, f"{rate:.0f} tokens/s")
    return AnswerCount(len(asked), len(prompts) - len(asked))


class AnswerFile:
    """The file of answers while it is written. ``answered`` holds the prompts that it has answers to."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._synced = time.monotonic()
        self.answered = self._read()

    @classmethod
    @contextmanager
    def opened(cls, path: Path, made_with: dict[str, object]) -> Iterator[AnswerFile]:
        """Open for appending, alone. ``made_with`` is kept beside the file, and must be what is kept there already."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{path} is being written by another process.") from None
            _check_settings(path, made_with, is_new=file.tell() == 0)
            answers = cls(path, file)
            try:
                yield answers
            finally:
                answers._sync()

    def append(self, completion: Completion, prompt: str, response: str) -> None:
        """Write one answer; it is safe from a kill when this returns."""
        entry = {
            "prompt": prompt,
            "response": response,
            "prompt_ids": completion.task.prompt_ids,
            "response_ids": completion.output_ids,
            "temperature": completion.task.temperature,
            "finish": completion.finish,
        }
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > _SYNC_S:
            self._sync()

    def _read(self) -> set[tuple[int, ...]]:
        """Prompts of all whole lines. A last line that a kill has torn is cut off."""
        self._file.seek(0)
        answered: set[tuple[int, ...]] = set()
        whole = 0
        torn: int | None = None
        for number, line in enumerate(self._file, start=1):
            if torn is not None:
                raise DataError(f"{self._path}, line {torn}: not an answer of this command.")
            try:
                ids = json.loads(line)["prompt_ids"]
                if not line.endswith(b"\n"):
                    raise ValueError
                answered.add(tuple(ids))
                whole += len(line)
            except (ValueError, KeyError, TypeError):
                torn = number
        if torn is not None:
            self._file.truncate(whole)
        return answered

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()


def _made_with(checkpoint: Checkpoint, settings: AnswerSettings) -> dict[str, object]:
    return {
        "target": checkpoint.folder.name,
        "fingerprint": checkpoint.fingerprint,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        **asdict(settings),
        "temperatures": list(settings.temperatures),
    }


def _check_settings(path: Path, made_with: dict[str, object], *, is_new: bool) -> None:
    beside = path.with_name(path.name + ".settings.json")
    if is_new:
        write_atomically(beside, (json.dumps(made_with, indent=2) + "\n").encode())
        return
    try:
        kept = json.loads(beside.read_text(encoding="utf-8"))
        differing = next((name for name in made_with if kept.get(name) != made_with[name]), None)
    except (OSError, ValueError, AttributeError):
        raise ConfigError(
            f"{path} holds something already, but {beside.name} does not say how it was made; name another file."
        ) from None
    if differing is not None:
        raise ConfigError(
            f"{path} was made with {differing} {kept.get(differing)}, now it is {made_with[differing]}; name another "
            f"file, or remove this one and {beside.name}."
        )


def _slots(checkpoint: Checkpoint, prompts: Sequence[Prompt], settings: AnswerSettings, sequences: int) -> int:
    """As many as all sequences can fill, but no more than a share of the memory holds."""
    largest = max(len(prompt.ids) for prompt in prompts) + settings.max_tokens
    wanted = largest * min(sequences, len(prompts))
    allowed = num_slots(Settings(engine=EngineSettings(max_sequences=sequences)), checkpoint)
    if allowed < largest:
        raise ConfigError(f"The memory holds {allowed} tokens, a prompt and its answer may take {largest}.")
    return min(wanted, allowed)
