"""``eagle2 train``: from prompts, or the target's answers to them, to a draft head in the published format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from eagle2.errors import ConfigError, Eagle2Error
from eagle2.models.dtype import resolve_device
from eagle2.models.loader import resolve_target
from eagle2.operations.argument_types import positive_int
from eagle2.training.answers import AnswerSettings
from eagle2.training.run import Plan, TrainingRun
from eagle2.training.trainer import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``eagle2 train``."""
    recipe = Recipe()

    def add(name: str, text: str, **options: Any) -> None:
        shown = " (default: %(default)s)" if options.get("default") is not None else ""
        parser.add_argument(name, help=text + shown, **options)

    add("--target", "'embedded', a folder, a .gguf file or a hub id", default="embedded")
    add("--prompts", "questions that the target answers first, .jsonl or .jsonl.gz", type=Path, metavar="FILE")
    add("--data", "conversations that the target wrote, .jsonl or .jsonl.gz", type=Path, nargs="+", default=[],
        metavar="FILE")  # fmt: skip
    add("--temperatures", "of the answers to --prompts, dealt out in turn; 0 is greedy", type=_not_negative, nargs="+",
        default=list(AnswerSettings().temperatures), metavar="T")  # fmt: skip
    add("--answer-tokens", "tokens of such an answer", type=positive_int, default=AnswerSettings().max_tokens)
    add("--out", "where the head is written", type=Path, required=True, metavar="DIR")
    add("--work", "where features and the state of the run are kept (default: OUT.work)", type=Path, metavar="DIR")
    add("--resume", "go on with the run in the work folder", action="store_true")
    add("--epochs", "passes over the data", type=positive_int, default=recipe.epochs)
    add("--hours", "end after so many hours, whatever the epochs say", type=_positive)
    add("--optimizer", "for the matrices", choices=("muon", "adamw"), default=recipe.optimizer)
    add("--lr", "peak learning rate", type=_positive, default=recipe.learning_rate)
    add("--schedule", "of the learning rate", choices=("cosine", "linear", "constant"), default=recipe.schedule)
    add("--warm-up", "steps until the learning rate is at its peak", type=positive_int, default=recipe.warm_up)
    add("--batch-tokens", "tokens of a step", type=positive_int, default=recipe.batch_tokens)
    add("--max-length", "tokens of an example, the rest is cut", type=positive_int, default=2048)
    add("--noise", "noise on input features", type=_not_negative, default=recipe.noise)
    add("--rollout", "passes over a batch; 2 and more train on the head's own predictions", type=positive_int,
        default=recipe.rollout)  # fmt: skip
    add("--rollout-from", "share of the steps after which the extra passes begin", type=_share,
        default=recipe.rollout_from)  # fmt: skip
    add("--regression", "weight of the feature loss", type=_not_negative, default=recipe.regression_weight)
    add("--cross-entropy", "weight of the next-token loss", type=_not_negative, default=recipe.cross_entropy_weight)
    add("--vocab-subset", "score only so many of the most frequent tokens in the loss", type=positive_int, default=8192)
    add("--holdout", "examples kept for measuring, at most a tenth of all", type=positive_int, default=200)
    add("--questions", "held-out prompts that the engine answers to measure tau, 0 for none", type=_count, default=16)
    add("--question-tokens", "tokens of such an answer", type=positive_int, default=64)
    add("--init", "start from the target's last layer ('target'), at 'random', or from the head in a folder",
        default="target", metavar="HOW")  # fmt: skip
    add("--dtype", "precision of the products", choices=("bfloat16", "float32"), default="bfloat16")
    add("--device", "auto, cpu, cuda", default="auto")
    add("--threads", "CPU threads (default: all)", type=positive_int)
    add("--seed", "of the order, the noise and the first weights", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Train a head as ``args`` say; returns the exit status. Progress goes to stderr."""
    try:
        TrainingRun(_plan(args)).train()
    except Eagle2Error as error:
        print(f"eagle2 train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. The same command with --resume goes on from here.", file=sys.stderr)
        return 130
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    if not args.data and args.prompts is None:
        raise ConfigError("There is nothing to train on: name --prompts to be answered or --data that is ready.")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return Plan(
        name=args.target,
        target=resolve_target(args.target),
        data=tuple(args.data),
        prompts=args.prompts,
        answers=AnswerSettings(tuple(args.temperatures), args.answer_tokens, seed=args.seed),
        out=args.out,
        work=args.work or args.out.with_name(args.out.name + ".work"),
        max_length=args.max_length,
        vocab_subset=args.vocab_subset,
        holdout=args.holdout,
        questions=args.questions,
        max_tokens=args.question_tokens,
        init=args.init,
        dtype=args.dtype,
        device=resolve_device(args.device),
        threads=args.threads,
        resume=args.resume,
        recipe=Recipe(
            epochs=args.epochs,
            hours=args.hours,
            optimizer=args.optimizer,
            learning_rate=args.lr,
            schedule=args.schedule,
            warm_up=args.warm_up,
            batch_tokens=args.batch_tokens,
            noise=args.noise,
            rollout=args.rollout,
            rollout_from=args.rollout_from,
            regression_weight=args.regression,
            cross_entropy_weight=args.cross_entropy,
            seed=args.seed,
            mixed=args.dtype == "bfloat16",
        ),
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share between 0 and 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 on")
    return value
