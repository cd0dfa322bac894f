"""Tokens per second of several systems on the same prompts, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from eagle2.errors import ConfigError
from eagle2.evaluation.measure import Generation, first_difference

System = Callable[[Sequence[int], int], Generation]
"""Answers a prompt (ids) with so many tokens at most."""

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """One answer of one system. Rounds count from 1."""

    round: int
    system: str
    prompt: str
    generation: Generation


@dataclass(frozen=True, slots=True)
class Difference:
    """A system's run that gave other tokens than the reference, first at ``position`` of the answer."""

    system: str
    prompt: str
    round: int
    position: int


@dataclass(frozen=True, slots=True)
class Speed:
    """One system over all rounds. Rates are tokens per second over all prompts of a round, one value a round."""

    decode_rates: tuple[float, ...]
    total_rates: tuple[float, ...]
    first_token_s: float
    tau: float | None


def measure_speed(
    systems: Mapping[str, System],
    prompts: Mapping[str, Sequence[int]],
    max_tokens: int,
    rounds: int,
    say: Callable[[str], None],
) -> list[Run]:
    """Every system answers every prompt once a round, one after the other, after a short warm-up that is not counted.

    Which system comes first moves on with every prompt and every round, so that a machine that becomes slower or
    faster meanwhile is unfair to nobody.
    """
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, not {rounds}.")
    names = list(systems)
    for name in names:
        say(f"Warming up: {name}")
        systems[name](next(iter(prompts.values())), min(_WARM_UP_TOKENS, max_tokens))
    runs = []
    for number in range(1, rounds + 1):
        for place, (prompt, ids) in enumerate(prompts.items()):
            first = (number - 1 + place) % len(names)
            for name in names[first:] + names[:first]:
                runs.append(Run(number, name, prompt, systems[name](ids, max_tokens)))
            rates = "  ".join(
                f"{r.system} {r.generation.decode_rate:.1f}" for r in sorted(runs[-len(names) :], key=_name)
            )
            say(f"round {number}/{rounds}, {prompt}: {rates} tok/s")
    return runs


def speed_of(system: str, runs: Sequence[Run]) -> Speed:
    """``tau`` is None for a system that counts no cycles."""
    own = [run for run in runs if run.system == system]
    rounds = [[run.generation for run in own if run.round == number] for number in sorted({run.round for run in own})]
    cycles = sum(run.generation.cycles for run in own)
    return Speed(
        decode_rates=tuple(_rate(sum(g.decode_tokens for g in r), sum(g.decode_s for g in r)) for r in rounds),
        total_rates=tuple(_rate(sum(len(g.token_ids) for g in r), sum(g.total_s for g in r)) for r in rounds),
        first_token_s=median(run.generation.first_token_s for run in own),
        tau=sum(run.generation.decode_tokens for run in own) / cycles if cycles else None,
    )


def ratio(speed: Speed, other: Speed) -> float:
    """How many times as fast as ``other``: the median over the rounds of the ratio within a round."""
    return median(mine / its if its else 0.0 for mine, its in zip(speed.decode_rates, other.decode_rates, strict=True))


def differences(system: str, reference: str, runs: Sequence[Run]) -> list[Difference]:
    """Every run of ``system`` whose tokens are not those of the reference's first run on that prompt."""
    expected: dict[str, tuple[int, ...]] = {}
    for run in runs:
        if run.system == reference:
            expected.setdefault(run.prompt, run.generation.token_ids)
    found = []
    for run in runs:
        if run.system == system:
            position = first_difference(run.generation.token_ids, expected[run.prompt])
            if position is not None:
                found.append(Difference(system, run.prompt, run.round, position))
    return found


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def _name(run: Run) -> str:
    return run.system
