"""``eagle2 bench``: the speed of this engine beside ``transformers``, or the acceptance of a draft head alone."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle2.config import Settings, load_settings
from eagle2.engine.assemble import tree_shape
from eagle2.errors import ConfigError
from eagle2.evaluation import report
from eagle2.evaluation.acceptance import measure_acceptance
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.prompts import Prompt, PromptEncoder, PromptSet, default_prompts, read_prompts, select
from eagle2.evaluation.trees import ShapedEngine, parse_shapes
from eagle2.speculative.draft import TreeShape

# Answers that are decoded at once where nothing is timed.
_BATCH = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``eagle2 bench`` that are not settings of model and engine."""
    add = parser.add_argument
    add("--shapes", metavar="LIST", help="tree shapes to compare, as drafted tokens/depth/top_k: 8/4/4,16/4/6,paper")
    add("--prompts", type=Path, metavar="FILE", help="questions in JSONL ('turns' or 'prompt'); default: MT-bench "
        "where it lies beside the checkout, else eight of the package")  # fmt: skip
    add("--limit", type=_positive, default=8, metavar="N", help="prompts to take, from all categories (default 8)")
    add("--max-tokens", type=_positive, default=128, metavar="N", help="tokens an answer (default 128)")
    add("--tau-only", action="store_true", help="measure only the acceptance of the draft head, each prompt once")
    add("--out", type=Path, metavar="DIR", help="write the report there as Markdown and JSON too")


def run(args: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    """Measure and print; returns the exit status. Raises ``Eagle2Error`` where nothing can be measured."""
    settings = load_settings(flags=flags, environ=True)
    shapes = _shapes(args.shapes, settings)
    prompts = read_prompts(args.prompts) if args.prompts else default_prompts()
    prompts = PromptSet(prompts.source, select(prompts.prompts, args.limit))
    return _acceptance(args, settings, shapes, prompts)


def _acceptance(args: argparse.Namespace, settings: Settings, shapes: tuple[TreeShape, ...], prompts: PromptSet) -> int:
    if not shapes:
        raise ConfigError("--tau-only measures a draft head, and --draft is none.")
    settings = replace(settings, engine=replace(settings.engine, max_sequences=_BATCH))
    conditions, engine = _start(settings, shapes)
    try:
        ids = _encode(engine, prompts)
        results = asyncio.run(measure_acceptance(engine, shapes, ids, args.max_tokens, say))
    finally:
        engine.close()
    model = _model(engine, prompts, args.max_tokens)
    text = f"{report.acceptance_table(results)}\n\n{report.conditions_lines(conditions, model)}"
    print(text)
    if args.out:
        values = {**report.conditions_json(conditions, model), "results": report.acceptance_json(results)}
        report.write_report(args.out, "acceptance", text, values)
    return 0


def _shapes(text: str | None, settings: Settings) -> tuple[TreeShape, ...]:
    if settings.model.draft is None:
        if text is not None:
            raise ConfigError("--shapes compares trees of a draft head, and --draft is none.")
        return ()
    return parse_shapes(text) if text is not None else (tree_shape(settings),)


def _start(settings: Settings, shapes: tuple[TreeShape, ...]) -> tuple[Conditions, ShapedEngine]:
    say("Loading the model")
    import torch

    engine = ShapedEngine(settings, shapes)  # sets the number of threads
    return Conditions.now(torch.get_num_threads()), engine


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
