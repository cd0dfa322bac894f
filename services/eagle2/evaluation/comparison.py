"""Speed beside ``transformers`` on the same weights: what a user gains over what everybody can run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from eagle2.evaluation.baseline import TransformersBaseline
from eagle2.evaluation.measure import wait_until_paired
from eagle2.evaluation.report import Comparison
from eagle2.evaluation.speed import Run, System, differences, measure_speed
from eagle2.evaluation.systems import system_of
from eagle2.evaluation.trees import ShapedEngine, shape_name
from eagle2.models.dtype import resolve_device
from eagle2.speculative.draft import TreeShape

BASELINE, PLAIN = "transformers", "eagle2, plain"


def compare(
    engine: ShapedEngine,
    shapes: Sequence[TreeShape],
    prompts: Mapping[str, Sequence[int]],
    max_tokens: int,
    rounds: int,
    say: Callable[[str], None],
    *,
    with_baseline: bool,
) -> Comparison:
    """Answer all prompts (ids by name) with ``transformers``, plainly and with each tree, in interleaved rounds.

    Raises ``ConfigError`` where transformers is not installed.
    """
    systems: dict[str, System] = {}
    baseline = None
    if with_baseline:
        say("Loading transformers")
        description = engine.description
        device = resolve_device(engine.settings.model.device)
        baseline = TransformersBaseline(engine.folder, description.dtype, device, description.eos_token_ids)
        systems[BASELINE] = baseline.generate
    with asyncio.Runner() as runner:
        if shapes:
            runner.run(wait_until_paired(engine.service))
        systems[PLAIN] = system_of(runner, engine, None)
        speculating = {f"eagle2, tree {shape_name(shape)}": shape for shape in shapes}
        systems |= {name: system_of(runner, engine, shape) for name, shape in speculating.items()}
        runs = measure_speed(systems, prompts, max_tokens, rounds, say)
    return Comparison(
        systems=tuple(systems),
        plain=PLAIN,
        baseline=BASELINE if baseline else None,
        runs=runs,
        lost=[difference for name in (PLAIN, *speculating) for difference in differences(name, PLAIN, runs)],
        dtype=engine.description.dtype,
        gaps=_gaps(baseline, prompts, runs) if baseline else {},
    )


def _gaps(
    baseline: TransformersBaseline, prompts: Mapping[str, Sequence[int]], runs: Sequence[Run]
) -> dict[str, float]:
    """Where ``transformers`` first chose another token: how far apart it sees the two, by prompt."""
    answers = {(run.system, run.prompt): run.generation.token_ids for run in reversed(runs)}
    gaps = {}
    for difference in differences(BASELINE, PLAIN, runs):
        prompt, position = difference.prompt, difference.position
        its, ours = answers[BASELINE, prompt], answers[PLAIN, prompt]
        if difference.round == 1 and position < min(len(its), len(ours)):
            gaps[prompt] = baseline.gap((*prompts[prompt], *ours[:position]), its[position], ours[position])
    return gaps
