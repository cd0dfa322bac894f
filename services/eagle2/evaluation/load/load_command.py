"""``eagle2 bench serve``: the engine under load, with speculation off, fixed and adaptive."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from eagle2.config import Settings, load_settings
from eagle2.engine.assemble import describe, load_checkpoint, tree_shape
from eagle2.errors import ConfigError
from eagle2.evaluation.load.cells import Load
from eagle2.evaluation.load.contenders import ADAPTIVE, OFF, Contender, LoadedEngines
from eagle2.evaluation.load.load_report import load_json, load_text
from eagle2.evaluation.load.rounds import LoadMeasurement, LoadPlan
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.prompts import PromptEncoder
from eagle2.evaluation.questions import default_questions, read_questions
from eagle2.evaluation.report import conditions_json, conditions_lines, write_report
from eagle2.evaluation.trees import parse_shapes
from eagle2.operations.argument_types import positive_int
from eagle2.operations.settings_flags import add_engine_flags, add_model_flags, given_settings
from eagle2.protocol import ModelDescription

N = TypeVar("N", int, float)

FIXED = "fixed"
_CONCURRENCY = "1,2,4,8,16,32"
_FIXED = ("10/2/8", "17/3/10")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``eagle2 bench serve``."""
    add_model_flags(parser)
    add_engine_flags(parser)
    add = parser.add_argument
    add("--settings", default=f"{OFF},{FIXED},{ADAPTIVE}", metavar="LIST", help="of off, fixed and adaptive (default: "
        "all)")  # fmt: skip
    add("--fixed", action="append", metavar="SHAPE", help="a tree of the setting fixed, as drafted tokens/depth/top_k; "
        f"may be given several times (default: {' and '.join(_FIXED)})")  # fmt: skip
    add("--adaptive", metavar="SHAPE", help="the largest tree of the setting adaptive (default: as served)")
    add("--concurrency", default=_CONCURRENCY, metavar="LIST", help="sequences at once (default "
        f"{_CONCURRENCY}); '' for none")  # fmt: skip
    add("--rates", default="", metavar="LIST", help="open loop: requests a second, Poisson (default: none)")
    add("--arrivals", type=positive_int, default=24, metavar="N", help="requests of an open loop (default 24)")
    add("--prompts", type=Path, metavar="FILE", help="questions in JSONL ('turns' or 'prompt'); default: MT-bench "
        "where it lies beside the checkout, else eight of the package")  # fmt: skip
    add("--limit", type=positive_int, default=40, metavar="N", help="questions to take (default 40)")
    add("--max-tokens", type=positive_int, default=64, metavar="N", help="tokens an answer (default 64)")
    add("--answers", type=positive_int, default=4, metavar="N", help="answers' worth of tokens that a window has at "
        "least; never fewer than half a one for each sequence (default 4)")  # fmt: skip
    add("--rounds", type=positive_int, default=5, metavar="N", help="rounds that are paired (default 5)")
    add("--proposer", choices=("process", "inline"), default="process", help="draft in a process of its own, as "
        "served (default), or in the engine's thread")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="write the report there too, as load.md and load.json")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 1 where a contender changed a token, and else 0.

    Raises ``Eagle2Error`` where nothing can be measured.
    """
    settings = load_settings(flags=given_settings(args), environ=True)
    contenders = _contenders(args, settings)
    loads = [
        *(Load(concurrency=n) for n in _numbers(args.concurrency, "--concurrency", int)),
        *(Load(rate=r) for r in _numbers(args.rates, "--rates", float)),
    ]
    if not loads:
        raise ConfigError("Nothing is asked for: --concurrency and --rates are both empty.")
    asked = (read_questions(args.prompts) if args.prompts else default_questions()).limited(args.limit)
    load = os.getloadavg()[0]
    say("Loading the model")
    description = describe(settings, load_checkpoint(settings.model))
    encoder = PromptEncoder(description)
    prompts = {question.name: encoder.conversation(question.turns[:1]) for question in asked.questions}
    settings = _sized(settings, description, contenders, loads, prompts, args.max_tokens)
    plan = LoadPlan(contenders, loads, prompts, args.rounds, args.max_tokens, args.answers, args.arrivals)
    say(f"Starting {len(contenders)} engines: {', '.join(contender.name for contender in contenders)}")
    engines = LoadedEngines(contenders, settings, args.proposer)
    model = {
        "target": description.name,
        "draft": settings.model.draft,
        "dtype": description.dtype,
        "proposer": args.proposer,
        "asked": f"{len(prompts)} prompts of {asked.source}, {args.max_tokens} tokens each, greedy, {args.rounds} "
        f"rounds, proposer {'in a process of its own' if args.proposer == 'process' else 'in the engine thread'}",
    }
    conditions = Conditions.now(load)
    measurement = LoadMeasurement(engines, plan, say)

    def report() -> str:
        cells, texts = measurement.cells, measurement.texts
        text = f"{load_text(cells, texts)}\n\n{conditions_lines(conditions, model)}"
        if args.out:
            write_report(args.out, "load", text, {**conditions_json(conditions, model), **load_json(cells, texts)})
        return text

    interrupted = False
    try:
        asyncio.run(measurement.run(report))
    except KeyboardInterrupt:
        interrupted = True
        say(f"Interrupted: this is what {len({cell.round for cell in measurement.cells})} whole rounds say.")
    finally:
        engines.close()
    if measurement.cells:
        print(report())
    if interrupted:
        return 130
    return 1 if measurement.texts.lost else 0


def _contenders(args: argparse.Namespace, settings: Settings) -> list[Contender]:
    wanted = [name.strip() for name in args.settings.split(",")]
    unknown = [name for name in wanted if name not in (OFF, FIXED, ADAPTIVE)]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no setting; there are {OFF}, {FIXED} and {ADAPTIVE}.")
    if settings.model.draft is None and wanted != [OFF]:
        raise ConfigError("Fixed and adaptive trees need a draft head, and --draft is none: ask for --settings off.")
    contenders = []
    if OFF in wanted:
        contenders.append(Contender(None))
    if FIXED in wanted:
        contenders += [Contender(shape) for shape in parse_shapes(",".join(args.fixed or _FIXED))]
    if ADAPTIVE in wanted:
        bounds = tree_shape(settings)
        if args.adaptive is not None:
            (bounds, *more) = parse_shapes(args.adaptive)
            if more:
                raise ConfigError(f"--adaptive is one tree shape, not {args.adaptive}.")
        contenders.append(Contender(bounds, adaptive=True))
    return contenders


def _sized(
    settings: Settings,
    description: ModelDescription,
    contenders: Sequence[Contender],
    loads: Sequence[Load],
    prompts: Mapping[str, Sequence[int]],
    max_tokens: int,
) -> Settings:
    """``settings`` with places and slots for all sequences of the largest load, for each of several engines.

    Prompts are asked again and again, by one contender and another: each is to read all of them, so that nothing is
    kept for later.
    """
    engine = settings.engine
    most = max((load.concurrency for load in loads if load.concurrency is not None), default=engine.max_sequences)
    nodes = max((contender.shape.num_nodes for contender in contenders if contender.shape), default=1)
    slots = most * (max(map(len, prompts.values())) + max_tokens + nodes)
    engine = replace(
        engine,
        max_sequences=most,
        kv_slots=engine.kv_slots or max(description.max_model_len, slots),
        prefix_cache=False,
    )
    return replace(settings, engine=engine)


def _numbers(text: str, option: str, kind: Callable[[str], N]) -> list[N]:
    if not text.strip():
        return []
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} is a list of numbers such as 1,2,4, not {text!r}.") from None
    if min(found) <= 0 or len(set(found)) < len(found):
        raise ConfigError(f"{option} has positive numbers, each once, not {text}.")
    return found


def say(text: str) -> None:
    """Progress goes to stderr: stdout is the report."""
    print(f"eagle2 bench serve: {text}", file=sys.stderr, flush=True)
