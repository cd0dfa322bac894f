"""The engine as something that answers one prompt after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from eagle2.evaluation.measure import Generation, bench_request, measure
from eagle2.evaluation.speed import System
from eagle2.evaluation.trees import ShapedEngine
from eagle2.speculative.draft import Policy, TreeShape, draft_trees


def system_of(
    runner: asyncio.Runner,
    engine: ShapedEngine,
    shape: TreeShape | None,
    policy: Policy = draft_trees,
    temperature: float = 0.0,
) -> System:
    """The engine with trees of this shape, or without speculation where it is None."""

    def answer(prompt_ids: Sequence[int], max_tokens: int) -> Generation:
        if shape is not None:
            engine.use(shape, policy)
        speculation = shape is not None
        request = bench_request(prompt_ids, max_tokens, speculation=speculation, name="bench", temperature=temperature)
        return runner.run(measure(engine.service, request))

    return answer
