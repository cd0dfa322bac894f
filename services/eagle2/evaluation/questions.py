"""What is asked when eagle2 is measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from eagle2.errors import ConfigError

# Beside a source checkout: the question sets that papers on speculative decoding report on.
DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "spec_tasks"

TASKS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa")
"""MT-bench (of two turns), HumanEval, GSM8K, Alpaca, CNN/Daily Mail, Natural Questions: the names of the files."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a user says, turn by turn, each after the answer to the one before. Names are unique in a set."""

    name: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions, the task's short name, and where they come from."""

    task: str
    source: str
    questions: tuple[Question, ...]

    def limited(self, limit: int) -> QuestionSet:
        return QuestionSet(self.task, self.source, select(self.questions, limit))


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


def built_in_questions() -> QuestionSet:
    """Eight questions of eight kinds that the package brings along."""
    questions = (Question(f"built-in/{kind}", kind, (text,)) for kind, text in _BUILT_IN)
    return QuestionSet("built-in", "the package", tuple(questions))


def read_questions(path: Path) -> QuestionSet:
    """A JSONL file of questions: ``turns`` or ``prompt``; ``question_id`` and ``category`` may be there.

    Raises ``ConfigError`` for a file that has none, or a line that is not one.
    """
    questions: list[Question] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            turns = entry["turns"] if "turns" in entry else [entry["prompt"]]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"Line {number} of {path} is no question: it needs 'turns' or 'prompt'.") from None
        if not isinstance(turns, list) or not turns:
            raise ConfigError(f"Line {number} of {path} is no question: its turns are {turns!r}.")
        for turn in turns:
            if not isinstance(turn, str) or not turn:
                raise ConfigError(f"Line {number} of {path} is no question: its text is {turn!r}.")
        name = f"{path.stem}/{entry.get('question_id', number)}"
        if any(name == question.name for question in questions):
            raise ConfigError(f"Line {number} of {path} has the question_id of an earlier line.")
        questions.append(Question(name, str(entry.get("category", "")), tuple(turns)))
    if not questions:
        raise ConfigError(f"{path} has no questions.")
    return QuestionSet(path.stem, path.name, tuple(questions))


def default_questions() -> QuestionSet:
    """MT-bench where it lies beside the checkout, else the built-in questions."""
    path = DATA / "mt_bench.jsonl"
    return read_questions(path) if path.is_file() else built_in_questions()


def find_tasks(names: str, folder: Path | None) -> tuple[list[QuestionSet], list[str]]:
    """The question sets of a list such as ``mt_bench,qa`` (``all``: the six), and why others were left out.

    ``folder`` None is the one beside the checkout; where that is missing, ``all`` is the eight questions of the
    package. Raises ``ConfigError`` for a name that is none, and a set that was asked for and is not there.
    """
    wanted = list(TASKS) if names == "all" else [name.strip() for name in names.split(",")]
    for i, name in enumerate(wanted):
        if name not in TASKS:
            raise ConfigError(f"{name!r} is no task; there are {', '.join(TASKS)}, and 'all'.")
        if name in wanted[:i]:
            raise ConfigError(f"The task {name} is named twice.")
    data = folder or DATA
    missing = [name for name in wanted if not (data / f"{name}.jsonl").is_file()]
    if missing and (names != "all" or folder is not None):
        raise ConfigError(f"{missing[0]}.jsonl is not in {data}; name the folder that has it with --data.")
    found = [read_questions(data / f"{name}.jsonl") for name in wanted if name not in missing]
    if not found:
        return [built_in_questions()], [f"{data} has no question sets: the eight questions of the package are asked."]
    return found, [f"{name} is left out: {name}.jsonl is not in {data}." for name in missing]


def select(questions: Sequence[Question], limit: int) -> tuple[Question, ...]:
    """``limit`` of the questions, taken from all categories in turn, so that few of them are still varied."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    dealt = chain.from_iterable(zip_longest(*by_category.values()))
    return tuple(question for question in dealt if question is not None)[:limit]
