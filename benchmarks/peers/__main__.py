"""``python -m benchmarks.peers``: this engine beside transformers, llama.cpp and vLLM, one prompt at a time."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.build import RECIPES, build
from benchmarks.peers.peers import PEERS, Places, start_ours, start_peer
from benchmarks.peers.peers_report import lost, peers_json, peers_text
from benchmarks.peers.workers import Worker
from eagle2.config import ModelSettings, Settings
from eagle2.engine.assemble import describe, load_checkpoint
from eagle2.errors import ConfigError, Eagle2Error
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.prompts import PromptEncoder
from eagle2.evaluation.questions import default_questions, read_questions
from eagle2.evaluation.report import conditions_json, conditions_lines, write_report
from eagle2.evaluation.speed import measure_speed


def main() -> int:
    args = _parser().parse_args()
    try:
        if args.command == "build":
            for peer in args.names or RECIPES:
                if peer not in RECIPES:
                    raise ConfigError(f"{peer!r} is no peer that is built; there are {', '.join(RECIPES)}.")
                build(peer, args.peers_dir, args.jobs, say)
            return 0
        return _run(args)
    except Eagle2Error as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    """Returns 1 where this engine's speculation changed a token, and else 0."""
    load, began = os.getloadavg()[0], time.monotonic()
    peers = args.peers.split(",") if args.peers else []
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no peer; there are {', '.join(PEERS)}.")
    places = Places(args.peers_dir.resolve(), args.threads)
    asked = (read_questions(args.prompts) if args.prompts else default_questions()).limited(args.limit)
    settings = ModelSettings(dtype="bfloat16")
    checkpoint = load_checkpoint(settings)
    encoder = PromptEncoder(describe(Settings(model=settings), checkpoint))
    prompts = {question.name: encoder.conversation(question.turns[:1]) for question in asked.questions}
    with ExitStack() as stack:
        workers: list[Worker] = []

        def start(worker: Worker) -> None:
            stack.callback(worker.close)
            workers.append(worker)

        def wait() -> None:
            for worker in workers:
                if not worker.about:
                    worker.wait()
                    say(f"{worker.name} is loaded ({time.monotonic() - began:.0f} s so far)")

        shapes = args.shapes.split(",")
        start(start_ours(places, shapes[0], "off"))
        for shape in shapes:
            start(start_ours(places, shape, "fixed"))
        for peer in peers:
            start(start_peer(places, peer))
        wait()
        if args.adaptive:
            # Measures what its steps cost as it starts: with nobody beside it.
            start(start_ours(places, args.adaptive, "adaptive"))
            wait()
        conditions = Conditions.now(load)
        runs = measure_speed({w.name: w for w in workers}, prompts, args.max_tokens, args.rounds, say)
    model = {
        "target": "SmolLM2-135M-Instruct",
        "draft": "embedded",
        "dtype": "bfloat16",
        "threads": args.threads,
        "asked": f"{len(prompts)} prompts of {asked.source}, {args.max_tokens} tokens each, greedy, one at a time, "
        f"{args.threads} threads for every system, {args.rounds} rounds",
    }
    text = f"{peers_text(workers, runs)}\n\n{conditions_lines(conditions, model)}"
    print(text)
    if args.out:
        write_report(args.out, "peers", text, {**conditions_json(conditions, model), **peers_json(workers, runs)})
    changed = lost(workers, runs)
    if changed:
        print(f"NOT LOSSLESS: {changed} runs have other tokens than plain decoding.")
    return 1 if changed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="install peers into environments of their own")
    making.add_argument("names", nargs="*", metavar="PEER", help=f"of {', '.join(RECIPES)}; default: all")
    making.add_argument("--jobs", type=int, default=1, metavar="N", help="compilers at once (default 1)")
    running = commands.add_parser("run", help="compare")
    running.add_argument("--peers", default=",".join(PEERS), metavar="LIST", help="default: all")
    running.add_argument("--shapes", default="10/2/8,17/3/10", metavar="LIST", help="fixed trees of this engine")
    running.add_argument("--adaptive", metavar="SHAPE", help="also trees of at most this size, chosen by cost")
    running.add_argument("--prompts", type=Path, metavar="FILE", help="questions in JSONL; default as `eagle2 bench`")
    running.add_argument("--limit", type=int, default=10, metavar="N", help="questions (default 10)")
    running.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens an answer (default 128)")
    running.add_argument("--rounds", type=int, default=2, metavar="N", help="rounds (default 2)")
    cores = len(os.sched_getaffinity(0))
    running.add_argument("--threads", type=int, default=cores, metavar="N", help="of every system; default: all cores")
    running.add_argument("--out", type=Path, metavar="DIR", help="write the report there too")
    for command in (making, running):
        command.add_argument("--peers-dir", type=Path, required=True, metavar="DIR", help="the peers' environments")
    return parser


def say(text: str) -> None:
    """Progress goes to stderr: stdout is the report."""
    print(f"peers: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
