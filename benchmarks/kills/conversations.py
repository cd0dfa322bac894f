"""What clients ask: conversations whose answers are known once they have been recorded."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_TOKENS = range(3, 290)  # of the tiny model's vocabulary, without its special ones


@dataclass(frozen=True, slots=True)
class Turn:
    """``added``: the ids that the client adds to what was said before. ``fields``: of the request's body."""

    added: tuple[int, ...]
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt with its answer is the beginning of the next turn's prompt."""

    number: int
    turns: tuple[Turn, ...]


def draw_conversations(seed: int, count: int, tokens: tuple[int, int]) -> list[Conversation]:
    """``count`` conversations of one to three turns, the same for the same arguments; answers of ``tokens`` tokens.

    Half of the turns are greedy, the others have a seed; some of both have penalties, which depend on what was said.
    """
    draw = random.Random(seed)
    return [
        Conversation(number, tuple(_turn(draw, tokens) for _ in range(draw.choice((1, 1, 2, 3)))))
        for number in range(count)
    ]


def _turn(draw: random.Random, tokens: tuple[int, int]) -> Turn:
    fields: dict[str, Any] = {"max_tokens": draw.randint(*tokens), "ignore_eos": True, "temperature": 0.0}
    if draw.random() < 0.5:
        fields |= {"temperature": draw.choice((0.7, 1.0)), "seed": draw.getrandbits(63)}
        fields |= draw.choice(({}, {"top_p": 0.9}, {"top_k": 20}))
    if draw.random() < 0.25:
        fields |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    return Turn(tuple(draw.choices(_TOKENS, k=draw.randint(4, 48))), fields)
