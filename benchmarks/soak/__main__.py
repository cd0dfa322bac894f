"""``python -m benchmarks.soak``: what it finds is printed and written as JSON; exit status 1 when anything is amiss."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.soak.run import Plan, soak
from benchmarks.soak.traffic import Sizes
from eagle2.config import load_settings
from eagle2.evaluation.machine import Conditions
from eagle2.models.dtype import use_threads
from eagle2.models.tiny import write_tiny_head, write_tiny_target
from eagle2.operations.settings_flags import add_engine_flags, add_model_flags, given_settings


def main() -> int:
    arguments = _parser().parse_args()
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="e2soak") as folder:
        settings = load_settings(_defaults(arguments.model, Path(folder)), flags=given_settings(arguments))
        use_threads(settings.engine.threads)
        sizes = Sizes(prompt=arguments.prompt_tokens, output=arguments.output_tokens)
        plan = Plan(
            requests=arguments.requests,
            seed=arguments.seed,
            sizes=sizes,
            kill_every=arguments.kill_every,
            in_process=arguments.in_process,
        )

        def say(line: str) -> None:
            print(f"[{time.monotonic() - began:6.0f} s] {line}", flush=True)

        # A little less than a request may need: an answer that is gone on with, its own prompt, its answer.
        longest = settings.model.max_model_len or 2 * sizes.prompt + sizes.output // 2
        slots = settings.engine.kv_slots or longest + longest // 2
        settings = replace(
            settings,
            model=replace(settings.model, max_model_len=longest),
            engine=replace(settings.engine, kv_slots=slots),
        )
        report = soak(settings, plan, say=say)
        result: dict[str, Any] = {
            "plan": asdict(plan),
            "settings": settings.as_dict(),
            "conditions": asdict(Conditions.now(load)),
            **report.as_dict(),
        }
    print(json.dumps({**report.as_dict(), "mismatches": report.mismatches[:3]}, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print("clean" if report.is_clean else "NOT CLEAN")
    return 0 if report.is_clean else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, metavar="N")
    models = "a random pair of two layers, or the embedded one (default); --target and --draft name others"
    parser.add_argument("--model", choices=("tiny", "embedded"), default="embedded", help=models)
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="of the longest fresh prompt")
    parser.add_argument("--output-tokens", type=int, default=40, metavar="N", help="of the longest answer")
    parser.add_argument(
        "--kill-every", type=int, default=0, metavar="N", help="requests after which a proposer is killed"
    )
    parser.add_argument("--in-process", action="store_true", help="the proposer is a thread, not a process")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything as JSON")
    add_model_flags(parser)
    add_engine_flags(parser)
    return parser


def _defaults(model: str, folder: Path) -> dict[str, dict[str, Any]]:
    if model == "embedded":
        return {}
    target = write_tiny_target(folder / "target")
    return {"model": {"target": str(target), "draft": str(write_tiny_head(folder / "head", target))}}


if __name__ == "__main__":
    sys.exit(main())
