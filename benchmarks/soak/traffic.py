"""Mixed requests from a seed: what many clients of several tenants might ask at once, and how they behave."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from eagle2.protocol import Priority, SamplingParams, StopConditions

Encode = Callable[[str], list[int]]

TENANTS = ("north", "south")
_OPENINGS = (
    "the old sailor follows the silver river ",
    "our neighbour buys the red mirror and the queen ",
    "Question: What is the capital of France? Answer: The capital of France is",
    "Write a short story about a captain and his ship. Once upon a time, there was a",
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
    "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return",
    "The seven days of the week are Monday, Tuesday, Wednesday,",
    "Once the rain had stopped, the keeper of the harbour opened the door and",
    "Here is a list of fruit:\n- apples\n- oranges\n- bananas\n-",
    "Dear Sir or Madam, I am writing to you because",
    "der \u00fcberm\u00fctige K\u00f6nig, \u6f22\u5b57 and \U0001f600: ",
    "User: Why is the sky blue?\nAssistant: The sky is blue because",
)
_WORDS = ("the", "a", "of", "and", "to", "in", "is", "it", "was", "for", "with", "he", "not", "red", "7", "(", ",", ".")
_STOP_STRINGS = ("e ", " the", ". ", "\n", "and", "qu", "never said", "th", "s,")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds in tokens: of a prompt (an answer that is gone on with included) and of an answer."""

    prompt: int = 64
    output: int = 40


@dataclass(frozen=True, slots=True)
class Ask:
    """One client's request. ``prompt`` are token ids.

    continues: the number of an earlier request. Its prompt and answer come before this one's prompt, where that has
    ended well and fits. patience: the client leaves when so many more items have come, of all streams together.
    deadline_s: from the moment of asking.
    """

    number: int
    tenant: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    speculation: bool = True
    priority: Priority = "interactive"
    continues: int | None = None
    patience: int | None = None
    deadline_s: float | None = None


def traffic(seed: int, count: int, encode: Encode, sizes: Sizes, bos: int | None = None) -> list[Ask]:
    """``count`` requests, the same for the same arguments.

    Half begin with one of three system prompts, a quarter repeat a recent request, one in nine goes on with one. Half
    are greedy, a quarter can wait. A tenth of the clients leave at a random moment, one in thirty has a deadline that
    may pass.
    """
    draw = random.Random(seed)
    begin = [] if bos is None else [bos]
    systems = [begin + encode(_text(draw))[: sizes.prompt // 2] for _ in range(3)]
    asks: list[Ask] = []
    for number in range(count):
        if number > 8 and draw.random() < 0.25:
            ask = replace(asks[draw.randrange(max(0, number - 60), number)], number=number, continues=None)
        else:
            ask = _fresh(draw, number, begin, systems, encode, sizes)
        asks.append(
            replace(
                ask,
                tenant=draw.choice(TENANTS),
                priority="batch" if draw.random() < 0.25 else "interactive",
                patience=draw.randrange(80) if draw.random() < 0.1 else None,
                deadline_s=draw.choice((-1.0, 0.02, 0.3, 3600.0)) if draw.random() < 1 / 30 else None,
            )
        )
    return asks


def _fresh(
    draw: random.Random, number: int, begin: list[int], systems: list[list[int]], encode: Encode, sizes: Sizes
) -> Ask:
    prompt = list(draw.choice(systems)) if draw.random() < 0.5 else list(begin)
    length = max(1, draw.choice((1, 4, sizes.prompt // 4, sizes.prompt // 2)))
    # Cut anywhere, as far as there is room: an opening is known to be gone on with.
    prompt += encode(draw.choice(_OPENINGS))[-min(length, sizes.prompt - len(prompt)) :]
    return Ask(
        number=number,
        tenant=TENANTS[0],
        prompt=tuple(prompt or encode("a")),
        sampling=_sampling(draw, encode),
        stop=_stop(draw, encode, sizes),
        speculation=draw.random() > 0.15,
        continues=draw.randrange(max(0, number - 60), number - 20) if number > 25 and draw.random() < 0.15 else None,
    )


def _text(draw: random.Random) -> str:
    return " ".join(draw.sample(_OPENINGS, 4))


def _sampling(draw: random.Random, encode: Encode) -> SamplingParams:
    """Half greedy, of these one in three with penalties or a bias; the rest by seed, with all that can be set."""
    sampled = draw.random() < 0.5
    chance = 0.35 if sampled else 0.15

    def maybe(off: float, *on: float) -> float:
        return draw.choice(on) if draw.random() < chance else off

    biased = draw.sample(_WORDS, 3) if draw.random() < chance else []
    return SamplingParams(
        seed=draw.getrandbits(64) if sampled else 0,
        temperature=draw.choice((0.3, 0.7, 1.0, 1.4)) if sampled else 0.0,
        top_p=maybe(1.0, 0.5, 0.9, 0.99) if sampled else 1.0,
        top_k=int(maybe(0, 1, 5, 40)) if sampled else 0,
        min_p=maybe(0.0, 0.05, 0.2) if sampled else 0.0,
        presence_penalty=maybe(0.0, -1.0, 0.5, 2.0),
        frequency_penalty=maybe(0.0, -0.5, 0.3, 1.5),
        repetition_penalty=maybe(1.0, 0.9, 1.2, 1.5),
        logit_bias=tuple({encode(" " + word)[0]: draw.choice((-100.0, -2.0, 3.0, 8.0)) for word in biased}.items()),
    )


def _stop(draw: random.Random, encode: Encode, sizes: Sizes) -> StopConditions:
    longest = sizes.output
    lengths = ((1, 3), (min(8, longest), longest // 2), (min(8, longest), longest // 2), (longest // 2, longest))
    low, high = draw.choice(lengths)
    return StopConditions(
        max_tokens=draw.randint(low, max(low, high)),
        stop_strings=tuple(draw.sample(_STOP_STRINGS, draw.choice((1, 2, 3)))) if draw.random() < 0.2 else (),
        stop_token_ids=(encode(" " + draw.choice(_WORDS))[-1],) if draw.random() < 0.15 else (),
        ignore_eos=draw.random() < 0.5,
    )
