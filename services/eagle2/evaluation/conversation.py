"""Questions of several turns, answered by an engine: each turn is asked after the answer to the one before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle2.evaluation.measure import Generation, bench_request, measure
from eagle2.evaluation.prompts import PromptEncoder
from eagle2.evaluation.questions import Question
from eagle2.protocol import Verifier


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. ``number`` counts a question's turns from 1; ``commits`` says how many tokens came at a time.

    The first commit is the prompt's own token and belongs to no cycle; every later one is a cycle's.
    """

    question: str
    number: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    commits: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.question if self.number == 1 else f"{self.question} turn {self.number}"

    @property
    def cycles(self) -> int:
        return max(0, len(self.commits) - 1)

    @property
    def decode_tokens(self) -> int:
        return sum(self.commits[1:])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Turn:
        lists = {key: tuple(values[key]) for key in ("prompt_ids", "token_ids", "commits")}
        return cls(question=values["question"], number=values["number"], **lists)


async def converse(
    verifier: Verifier,
    encoder: PromptEncoder,
    question: Question,
    max_tokens: int,
    temperature: float,
    *,
    speculation: bool,
    on_turn: Callable[[Turn], None] = lambda _: None,
) -> list[Turn]:
    """Ask all turns of a question; ``max_tokens`` bounds each answer. A cut answer stands as it is in what follows."""
    said: list[str] = []
    turns = []
    for number, text in enumerate(question.turns, start=1):
        said.append(text)
        prompt_ids = encoder.conversation(said)
        request = bench_request(
            prompt_ids, max_tokens, speculation=speculation, name=question.name, temperature=temperature
        )
        written: list[str] = []
        generation: Generation = await measure(verifier, request, written.append)
        said.append("".join(written))
        turns.append(Turn(question.name, number, prompt_ids, generation.token_ids, generation.commits))
        on_turn(turns[-1])
    return turns


async def converse_all(
    verifier: Verifier,
    encoder: PromptEncoder,
    questions: Sequence[Question],
    max_tokens: int,
    temperature: float,
    at_once: int,
    *,
    speculation: bool,
    on_turn: Callable[[Turn], None] = lambda _: None,
) -> list[Turn]:
    """All questions, ``at_once`` at a time. A sequence's trees do not depend on its neighbours, nor do its tokens."""
    places = asyncio.Semaphore(at_once)

    async def one(question: Question) -> list[Turn]:
        async with places:
            return await converse(
                verifier, encoder, question, max_tokens, temperature, speculation=speculation, on_turn=on_turn
            )

    return [turn for turns in await asyncio.gather(*map(one, questions)) for turn in turns]
