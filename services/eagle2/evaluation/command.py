"""``eagle2 bench``: the paper's tables for this head and this machine, or the speed beside ``transformers``."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle2.config import Settings, load_settings
from eagle2.engine.assemble import tree_shape
from eagle2.errors import ConfigError
from eagle2.evaluation.comparison import compare
from eagle2.evaluation.load import load_command
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.measure import wait_until_paired
from eagle2.evaluation.methods import EAGLE2, parse_methods
from eagle2.evaluation.observations import CalibrationRecorder
from eagle2.evaluation.plan import Plan
from eagle2.evaluation.plots import write_plots
from eagle2.evaluation.prompts import PromptEncoder
from eagle2.evaluation.questions import default_questions, find_tasks, read_questions
from eagle2.evaluation.report import conditions_json, conditions_lines, speed_json, speed_text, write_report
from eagle2.evaluation.results import Results
from eagle2.evaluation.speed_cells import SpeedMeasurement
from eagle2.evaluation.tables import results_json, tables_text
from eagle2.evaluation.tau import TauMeasurement
from eagle2.evaluation.trees import PAPER, ShapedEngine, parse_shapes
from eagle2.models.loader import resolve_draft
from eagle2.operations.argument_types import positive_int
from eagle2.operations.settings_flags import add_engine_flags, add_model_flags, given_settings
from eagle2.speculative.draft import TreeShape

_LIMIT, _TABLE_LIMIT = 8, 20
_TABLE_OPTIONS = ("tasks", "data", "methods", "temperatures", "speed_methods")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``eagle2 bench`` and of ``eagle2 bench serve``."""
    serve = "throughput and latency under load, with speculation off, fixed and adaptive"
    what = parser.add_subparsers(dest="what", metavar="serve", title="another measurement")
    load_command.add_arguments(what.add_parser("serve", help=serve, description=serve.capitalize() + "."))
    add_model_flags(parser)
    add_engine_flags(parser)
    both = parser.add_argument
    both("--prompts", type=Path, metavar="FILE", help="questions in JSONL ('turns' or 'prompt'); default: MT-bench "
         "where it lies beside the checkout, else eight of the package")  # fmt: skip
    both("--shapes", metavar="LIST", help="trees as drafted tokens/depth/top_k: 8/4/4,16/4/6,paper; default: the tree "
         "that is served, for tables the paper's before it")  # fmt: skip
    both("--limit", type=positive_int, metavar="N", help="questions to take, from all categories "
         f"(default {_LIMIT}; for tables {_TABLE_LIMIT} a task)")  # fmt: skip
    both("--max-tokens", type=positive_int, default=128, metavar="N", help="tokens an answer (default 128)")
    both(
        "--rounds", type=positive_int, default=3, metavar="N", help="rounds that the medians are taken over (default 3)"
    )
    both("--no-baseline", action="store_true", help="leave transformers out of the comparison")
    both("--out", type=Path, metavar="DIR", help="write the report there too; tables go on with what DIR holds already")
    table = parser.add_argument_group("tables of methods by tasks (any of these options asks for them)").add_argument
    table("--tasks", metavar="LIST", help="mt_bench,humaneval,gsm8k,alpaca,sum,qa, or 'all' (default)")
    table("--data", type=Path, metavar="DIR", help="the folder with the tasks' files, NAME.jsonl")
    table("--methods", metavar="LIST", help="eagle1,eagle2,no_value,no_rerank,neither, or 'all' (default)")
    table("--temperatures", metavar="LIST", help="sampling temperatures (default 0,1)")
    table("--tau-only", action="store_true", help="measure acceptance alone, nothing is timed")
    table("--fast", action="store_true", help="for tau, verify only the nodes that plain decoding's answer goes "
          "through: the same figures sooner, checked on a question of each method")  # fmt: skip
    table("--speed-methods", metavar="LIST", help=f"methods that are timed beside plain decoding (default {EAGLE2})")
    table(
        "--speed-limit", type=positive_int, default=10, metavar="N", help="questions that are timed (default 10 a task)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 1 where speculation changed a token, and else 0.

    Raises ``Eagle2Error`` where nothing can be measured.
    """
    if args.what == "serve":
        return load_command.run(args)
    settings = load_settings(flags=given_settings(args), environ=True)
    for_tables = args.tau_only or args.fast or any(getattr(args, name) is not None for name in _TABLE_OPTIONS)
    return _tables(args, settings) if for_tables else _comparison(args, settings)


def _comparison(args: argparse.Namespace, settings: Settings) -> int:
    shapes = _shapes(args.shapes, settings, (tree_shape(settings),))
    asked = (read_questions(args.prompts) if args.prompts else default_questions()).limited(args.limit or _LIMIT)
    # One at a time: slots for more would only take memory.
    settings = replace(settings, engine=replace(settings.engine, max_sequences=1))
    load = os.getloadavg()[0]
    say("Loading the model")
    engine = ShapedEngine(settings, shapes)
    try:
        conditions = Conditions.now(load)
        encoder = PromptEncoder(engine.description)
        # First turns: what comes later needs the answers.
        prompts = {question.name: encoder.conversation(question.turns[:1]) for question in asked.questions}
        comparison = compare(
            engine, shapes, prompts, args.max_tokens, args.rounds, say, with_baseline=not args.no_baseline
        )
        model = {
            **_model(engine, args.max_tokens),
            "prompt_source": asked.source,
            "prompts": len(prompts),
            "prompt_names": list(prompts),
            "asked": f"{len(prompts)} prompts of {asked.source}, {args.max_tokens} tokens each, greedy",
        }
    finally:
        engine.close()
    values = {**conditions_json(conditions, model), **speed_json(comparison)}
    _publish(args.out, "speed", f"{speed_text(comparison)}\n\n{conditions_lines(conditions, model)}", values)
    return 1 if comparison.lost else 0


def _tables(args: argparse.Namespace, settings: Settings) -> int:
    if settings.model.draft is None:
        raise ConfigError("Tables of methods and --tau-only measure a draft head, and --draft is none.")
    plan = _plan(args, settings)
    load = os.getloadavg()[0]
    say("Loading the model")
    recorder = CalibrationRecorder()
    engine = ShapedEngine(settings, plan.shapes, recorder.wrap)
    try:
        conditions = Conditions.now(load)
        limit = args.limit or _TABLE_LIMIT
        results = Results(args.out, {**_identity(engine, args.max_tokens), "limit": limit})
        interrupted = False
        try:
            with asyncio.Runner() as runner:
                runner.run(wait_until_paired(engine.service))
                runner.run(TauMeasurement(engine, plan, results, recorder).run())
                SpeedMeasurement(engine, plan, results).run(runner)
        except KeyboardInterrupt:
            interrupted = True
            say("Interrupted: this is what was measured so far.")
        tasks = ", ".join(f"{task.task} {len(task.questions)}" for task in plan.tasks)
        model = {
            **_model(engine, args.max_tokens),
            "asked": f"questions a task: {tasks}; {args.max_tokens} tokens an answer",
        }
    finally:
        engine.close()
    values = {**conditions_json(conditions, model), **results_json(results)}
    _publish(args.out, "tables", f"{tables_text(values)}\n\n{conditions_lines(conditions, model)}", values)
    if args.out:
        for path in _plot(values, args.out):
            say(f"wrote {path}")
    if interrupted:
        return 130
    return 0 if values["lossless"] else 1


def _plan(args: argparse.Namespace, settings: Settings) -> Plan:
    if args.prompts and (args.tasks or args.data):
        raise ConfigError("--prompts is a question set of its own: leave out --tasks and --data.")
    if args.prompts:
        tasks = [read_questions(args.prompts)]
    else:
        tasks, remarks = find_tasks(args.tasks or "all", args.data)
        for remark in remarks:
            say(remark)
    served = tree_shape(settings)
    default = (PAPER,) if served == PAPER else (PAPER, served)
    speed_methods: Sequence[str] = ()
    if not args.tau_only:
        speed_methods = parse_methods(args.speed_methods or EAGLE2)
    return Plan(
        tasks=[task.limited(args.limit or _TABLE_LIMIT) for task in tasks],
        # The one that matters first: whoever stops early has it.
        methods=sorted(parse_methods(args.methods or "all"), key=lambda method: method != EAGLE2),
        shapes=_shapes(args.shapes, settings, default),
        temperatures=_temperatures(args.temperatures or "0,1"),
        max_tokens=args.max_tokens,
        fast=args.fast,
        speed_methods=speed_methods,
        speed_limit=args.speed_limit,
        rounds=args.rounds,
    )


def _shapes(text: str | None, settings: Settings, default: tuple[TreeShape, ...]) -> tuple[TreeShape, ...]:
    if settings.model.draft is None:
        if text is not None:
            raise ConfigError("--shapes compares trees of a draft head, and --draft is none.")
        return ()
    return parse_shapes(text) if text is not None else default


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{text!r} is no list of temperatures; write such as 0,1.") from None
    if not all(0 <= temperature <= 2 for temperature in found) or len(set(found)) < len(found):
        raise ConfigError(f"Temperatures lie between 0 and 2 and are named once, not {text}.")
    return found


def _model(engine: ShapedEngine, max_tokens: int) -> dict[str, Any]:
    return {
        "target": engine.description.name,
        "draft": engine.settings.model.draft,
        "dtype": engine.description.dtype,
        "max_tokens": max_tokens,
    }


def _identity(engine: ShapedEngine, max_tokens: int) -> dict[str, Any]:
    """What results must have in common to stand in one table."""
    model = engine.settings.model
    assert model.draft is not None
    digest = hashlib.sha256()
    for path in sorted(resolve_draft(model.draft).iterdir()):
        if path.suffix in (".safetensors", ".bin"):
            digest.update(path.read_bytes())
    return {
        **_model(engine, max_tokens),
        "draft_vocabulary": model.draft_vocabulary,
        "draft_sha256": digest.hexdigest(),
        "max_model_len": engine.description.max_model_len,
    }


def _plot(values: dict[str, Any], out: Path) -> list[Path]:
    """Pictures, a folder for each tree."""
    trees = list(dict.fromkeys(row["tree"] for row in [*values["tau"], *values["speed"]] if row["tree"]))
    written = []
    for tree in trees:
        own: dict[str, Any] = {key: [row for row in values[key] if row["tree"] == tree] for key in ("tau", "speed")}
        own["calibration"] = {t: report for t, report in values["calibration"].items() if report["tree"] == tree}
        written += write_plots(own, out / f"plots-{tree.replace('/', '-')}")
    return written


def _publish(out: Path | None, name: str, text: str, values: dict[str, Any]) -> None:
    print(text)
    if out:
        write_report(out, name, text, values)


def say(text: str) -> None:
    """Progress goes to stderr: stdout is the report."""
    print(f"eagle2 bench: {text}", file=sys.stderr, flush=True)
