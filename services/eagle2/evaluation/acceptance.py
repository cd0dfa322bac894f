"""Mean acceptance length (tau) by tree shape: how good a draft head is, whatever the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eagle2.evaluation.measure import Generation, greedy_request, measure, wait_until_paired
from eagle2.evaluation.trees import ShapedEngine, shape_name
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one tree shape gave over all prompts.

    ``per_position`` is, for each depth, the share of trees that were accepted at least that deep.
    """

    shape: TreeShape
    generations: Mapping[str, Generation]
    per_position: tuple[float, ...]

    @property
    def cycles(self) -> int:
        return sum(generation.cycles for generation in self.generations.values())

    @property
    def tokens(self) -> int:
        """Committed tokens, the first of each answer not counted: it comes from the prompt's forward pass."""
        return sum(generation.decode_tokens for generation in self.generations.values())

    @property
    def tau(self) -> float:
        return self.tokens / self.cycles if self.cycles else 0.0


async def measure_acceptance(
    engine: ShapedEngine,
    shapes: Sequence[TreeShape],
    prompts: Mapping[str, Sequence[int]],
    max_tokens: int,
    say: Callable[[str], None],
) -> list[Acceptance]:
    """Answer all prompts (ids by name) greedily, once per shape, as many at once as the engine takes.

    A sequence's trees do not depend on its neighbours, so neither does tau.
    """
    await wait_until_paired(engine.service)
    places = asyncio.Semaphore(engine.settings.engine.max_sequences)

    async def answer(name: str, ids: Sequence[int]) -> Generation:
        async with places:
            return await measure(engine.service, greedy_request(ids, max_tokens, speculation=True, name=name))

    results = []
    for shape in shapes:
        engine.use(shape)
        before = await engine.service.stats()
        generations = await asyncio.gather(*(answer(name, ids) for name, ids in prompts.items()))
        after = await engine.service.stats()
        per_position = _per_position(before, after, shape.depth)
        result = Acceptance(shape, dict(zip(prompts, generations, strict=True)), per_position)
        say(f"{shape_name(shape)}: tau {result.tau:.3f} over {result.cycles} cycles")
        results.append(result)
    return results


def _per_position(before: Mapping[str, float], after: Mapping[str, float], depth: int) -> tuple[float, ...]:
    def grown(key: str) -> float:
        return after.get(key, 0.0) - before.get(key, 0.0)

    trees = grown(metrics.NUM_DRAFTS.sample())
    accepted = (grown(metrics.NUM_ACCEPTED_TOKENS_PER_POS.sample(pos=position)) for position in range(depth))
    return tuple(count / trees if trees else 0.0 for count in accepted)
