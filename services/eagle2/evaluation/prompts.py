"""What is asked when eagle2 is measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from eagle2.errors import ConfigError, ModelError
from eagle2.protocol import ModelDescription
from eagle2.text.chat import ChatTemplate
from eagle2.text.tokenizer import Tokenizer

# Beside a source checkout: the questions that papers on speculative decoding report on.
_QUESTIONS = Path(__file__).resolve().parents[4] / "shared" / "data" / "spec_tasks" / "mt_bench.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. ``name`` is unique within its set."""

    name: str
    category: str
    text: str


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Questions, and where they come from."""

    source: str
    prompts: tuple[Prompt, ...]


_BUILT_IN = (
    ("writing", "Write a short letter to a neighbour who has lent you a ladder. Thank her and offer help in return."),
    ("roleplay", "You are the keeper of a lighthouse. Tell a visiting child what you do on a stormy night."),
    (
        "reasoning",
        "Anna is taller than Ben. Ben is taller than Clara. David is shorter than Clara. Who is the second tallest, "
        "and how do you know?",
    ),
    ("math", "A shop sells pens at 3 for 4 dollars. How much do 21 pens cost? Show each step."),
    ("coding", "Write a Python function that returns the words of a text that occur more than once, sorted."),
    (
        "extraction",
        "List the dates and places in this text as a table: 'The ship left Porto on 3 May 1921, reached Dakar on "
        "12 May and arrived in Recife on 24 May.'",
    ),
    ("stem", "Why does ice float on water, and what would happen to a lake in winter if it did not?"),
    ("humanities", "Name three causes of the decline of canal transport in the nineteenth century and explain each."),
)


def built_in_prompts() -> PromptSet:
    """Eight questions of eight kinds that the package brings along."""
    return PromptSet("built-in", tuple(Prompt(f"built-in/{kind}", kind, text) for kind, text in _BUILT_IN))


def read_prompts(path: Path) -> PromptSet:
    """First turns of a JSONL file of questions: ``turns`` or ``prompt``; ``question_id`` and ``category`` may be there.

    Raises ``ConfigError`` for a file that has none, or a line that is not one.
    """
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["turns"][0] if "turns" in entry else entry["prompt"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConfigError(f"Line {number} of {path} is no question: it needs 'turns' or 'prompt'.") from None
        if not isinstance(text, str) or not text:
            raise ConfigError(f"Line {number} of {path} is no question: its text is {text!r}.")
        name = f"{path.stem}/{entry.get('question_id', number)}"
        prompts.append(Prompt(name, str(entry.get("category", "")), text))
    if not prompts:
        raise ConfigError(f"{path} has no questions.")
    return PromptSet(path.name, tuple(prompts))


def default_prompts() -> PromptSet:
    """MT-bench where it lies beside the checkout, else the built-in questions."""
    return read_prompts(_QUESTIONS) if _QUESTIONS.is_file() else built_in_prompts()


def select(prompts: Sequence[Prompt], limit: int) -> tuple[Prompt, ...]:
    """``limit`` of the prompts, taken from all categories in turn, so that few of them are still varied."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    dealt = chain.from_iterable(zip_longest(*by_category.values()))
    return tuple(prompt for prompt in dealt if prompt is not None)[:limit]


class PromptEncoder:
    """Turns text into the ids that a model reads, as the HTTP API does."""

    def __init__(self, description: ModelDescription) -> None:
        self._name = description.name
        self._tokenizer = Tokenizer(description.tokenizer_json)
        self._template = None
        if description.chat_template is not None:
            self._template = ChatTemplate(description.chat_template, description.bos_token, description.eos_token)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def chat(self, text: str, system: str | None = None) -> tuple[int, ...]:
        """A user's message, with a system message before it. Raises ``ModelError`` without a chat template."""
        if self._template is None:
            raise ModelError(f"The model {self._name!r} has no chat template: it can only continue a raw text (--raw).")
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        # The template writes the start token itself.
        return tuple(self._tokenizer.encode(self._template.render(messages), add_special_tokens=False))

    def raw(self, text: str) -> tuple[int, ...]:
        """A text to be continued as it stands."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True))
