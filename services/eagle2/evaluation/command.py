"""``eagle2 bench``: the speed of this engine beside ``transformers``, or the acceptance of a draft head alone."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle2.config import Settings, load_settings
from eagle2.engine.assemble import tree_shape
from eagle2.errors import ConfigError
from eagle2.evaluation import report
from eagle2.evaluation.acceptance import measure_acceptance
from eagle2.evaluation.baseline import TransformersBaseline
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.measure import Generation, greedy_request, measure, wait_until_paired
from eagle2.evaluation.prompts import Prompt, PromptEncoder, PromptSet, default_prompts, read_prompts, select
from eagle2.evaluation.speed import Run, System, differences, measure_speed
from eagle2.evaluation.trees import ShapedEngine, parse_shapes, shape_name
from eagle2.models.dtype import resolve_device
from eagle2.operations.settings_flags import add_engine_flags, add_model_flags, given_settings
from eagle2.speculative.draft import TreeShape

BASELINE, PLAIN = "transformers", "eagle2, plain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``eagle2 bench``."""
    add_model_flags(parser)
    add_engine_flags(parser)
    add = parser.add_argument
    add("--shapes", metavar="LIST", help="tree shapes to compare, as drafted tokens/depth/top_k: 8/4/4,16/4/6,paper")
    add("--prompts", type=Path, metavar="FILE", help="questions in JSONL ('turns' or 'prompt'); default: MT-bench "
        "where it lies beside the checkout, else eight of the package")  # fmt: skip
    add("--limit", type=_positive, default=8, metavar="N", help="prompts to take, from all categories (default 8)")
    add("--max-tokens", type=_positive, default=128, metavar="N", help="tokens an answer (default 128)")
    add("--rounds", type=_positive, default=3, metavar="N", help="rounds that the medians are taken over (default 3)")
    add("--no-baseline", action="store_true", help="leave transformers out")
    add("--tau-only", action="store_true", help="measure only the acceptance of the draft head, each prompt once")
    add("--out", type=Path, metavar="DIR", help="write the report there as Markdown and JSON too")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 1 where speculation changed a token, and else 0.

    Raises ``Eagle2Error`` where nothing can be measured.
    """
    settings = load_settings(flags=given_settings(args), environ=True)
    shapes = _shapes(args.shapes, settings)
    prompts = read_prompts(args.prompts) if args.prompts else default_prompts()
    prompts = PromptSet(prompts.source, select(prompts.prompts, args.limit))
    load = os.getloadavg()[0]
    if not args.tau_only:
        # One at a time: slots for more would only take memory.
        settings = replace(settings, engine=replace(settings.engine, max_sequences=1))
    elif not shapes:
        raise ConfigError("--tau-only measures a draft head, and --draft is none.")
    say("Loading the model")
    engine = ShapedEngine(settings, shapes)
    try:
        conditions = Conditions.now(load)
        return (_acceptance if args.tau_only else _speed)(args, engine, shapes, prompts, conditions)
    finally:
        engine.close()


def _acceptance(
    args: argparse.Namespace,
    engine: ShapedEngine,
    shapes: Sequence[TreeShape],
    prompts: PromptSet,
    conditions: Conditions,
) -> int:
    ids = _encode(engine, prompts)
    results = asyncio.run(measure_acceptance(engine, shapes, ids, args.max_tokens, say))
    model = _model(engine, prompts, args.max_tokens)
    text = f"{report.acceptance_table(results)}\n\n{report.conditions_lines(conditions, model)}"
    print(text)
    if args.out:
        values = {**report.conditions_json(conditions, model), "results": report.acceptance_json(results)}
        report.write_report(args.out, "acceptance", text, values)
    return 0


def _speed(
    args: argparse.Namespace,
    engine: ShapedEngine,
    shapes: Sequence[TreeShape],
    prompts: PromptSet,
    conditions: Conditions,
) -> int:
    ids = _encode(engine, prompts)
    systems: dict[str, System] = {}
    baseline = None
    if not args.no_baseline:
        say("Loading transformers")
        description = engine.description
        device = resolve_device(engine.settings.model.device)
        baseline = TransformersBaseline(engine.folder, description.dtype, device, description.eos_token_ids)
        systems[BASELINE] = baseline.generate
    with asyncio.Runner() as runner:
        if shapes:
            runner.run(wait_until_paired(engine.service))
        systems[PLAIN] = _system(runner, engine, None)
        speculating = {f"eagle2, tree {shape_name(shape)}": shape for shape in shapes}
        systems |= {name: _system(runner, engine, shape) for name, shape in speculating.items()}
        runs = measure_speed(systems, ids, args.max_tokens, args.rounds, say)
    lost = [difference for name in (PLAIN, *speculating) for difference in differences(name, PLAIN, runs)]
    comparison = report.Comparison(
        systems=tuple(systems),
        plain=PLAIN,
        baseline=BASELINE if baseline else None,
        runs=runs,
        lost=lost,
        dtype=engine.description.dtype,
        gaps=_gaps(baseline, ids, runs) if baseline else {},
    )
    model = _model(engine, prompts, args.max_tokens)
    text = f"{report.speed_text(comparison)}\n\n{report.conditions_lines(conditions, model)}"
    print(text)
    if args.out:
        values = {**report.conditions_json(conditions, model), **report.speed_json(comparison)}
        report.write_report(args.out, "speed", text, values)
    return 1 if lost else 0


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


def _system(runner: asyncio.Runner, engine: ShapedEngine, shape: TreeShape | None) -> System:
    """The engine with trees of this shape, or without speculation where it is None."""

    def answer(prompt_ids: Sequence[int], max_tokens: int) -> Generation:
        if shape is not None:
            engine.use(shape)
        request = greedy_request(prompt_ids, max_tokens, speculation=shape is not None, name="bench")
        return runner.run(measure(engine.service, request))

    return answer


def _shapes(text: str | None, settings: Settings) -> tuple[TreeShape, ...]:
    if settings.model.draft is None:
        if text is not None:
            raise ConfigError("--shapes compares trees of a draft head, and --draft is none.")
        return ()
    return parse_shapes(text) if text is not None else (tree_shape(settings),)


def _encode(engine: ShapedEngine, prompts: PromptSet) -> dict[str, tuple[int, ...]]:
    encoder = PromptEncoder(engine.description)

    def ids(prompt: Prompt) -> tuple[int, ...]:
        return encoder.chat(prompt.text) if encoder.has_template else encoder.raw(prompt.text)

    return {prompt.name: ids(prompt) for prompt in prompts.prompts}


def _model(engine: ShapedEngine, prompts: PromptSet, max_tokens: int) -> dict[str, Any]:
    return {
        "target": engine.description.name,
        "draft": engine.settings.model.draft,
        "dtype": engine.description.dtype,
        "prompt_source": prompts.source,
        "prompts": len(prompts.prompts),
        "prompt_names": [prompt.name for prompt in prompts.prompts],
        "max_tokens": max_tokens,
    }


def say(text: str) -> None:
    """Progress goes to stderr: stdout is the report."""
    print(f"eagle2 bench: {text}", file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return value
