"""``eagle2 train``: from a file of the target's answers to a draft head in the published format."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle2.errors import ConfigError, Eagle2Error
from eagle2.models.architecture import DraftConfig
from eagle2.models.loader import resolve_target
from eagle2.training.agreement import Agreement, measure_agreement
from eagle2.training.batches import Batch, epoch_order, make_batch
from eagle2.training.card import Training, model_card
from eagle2.training.checkpoint import STATE, head_config, write_atomically, write_head
from eagle2.training.data import ChatEncoder, Example, read_examples
from eagle2.training.features import FeatureStore
from eagle2.training.head import DraftHead, initialise, initialise_from_target
from eagle2.training.loss import Scorer
from eagle2.training.progress import Progress
from eagle2.training.target import FrozenTarget
from eagle2.training.trainer import Recipe, StepReport, Trainer
from eagle2.training.vocabulary import frequent_ids

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``eagle2 train``."""
    recipe = Recipe()

    def add(name: str, text: str, **options: Any) -> None:
        shown = " (default: %(default)s)" if options.get("default") is not None else ""
        parser.add_argument(name, help=text + shown, **options)

    add("--target", "'embedded', a folder, a .gguf file or a hub id", default="embedded")
    add("--data", "conversations that the target wrote, .jsonl or .jsonl.gz", type=Path, required=True, metavar="FILE")
    add("--out", "where the head is written", type=Path, required=True, metavar="DIR")
    add("--work", "where features and the state of the run are kept (default: OUT.work)", type=Path, metavar="DIR")
    add("--resume", "go on with the run in the work folder", action="store_true")
    add("--epochs", "passes over the data", type=_positive_int, default=recipe.epochs)
    add("--lr", "peak learning rate", type=_positive, default=recipe.learning_rate)
    add("--batch-tokens", "tokens of a step", type=_positive_int, default=recipe.batch_tokens)
    add("--max-length", "tokens of an example, the rest is cut", type=_positive_int, default=2048)
    add("--noise", "noise on input features", type=_not_negative, default=recipe.noise)
    add("--rollout", "passes over a batch; 2 and more train on the head's own predictions", type=_positive_int,
        default=recipe.rollout)  # fmt: skip
    add("--rollout-from", "share of the steps after which the extra passes begin", type=_share,
        default=recipe.rollout_from)  # fmt: skip
    add("--cross-entropy", "weight of the next-token loss", type=_not_negative, default=recipe.cross_entropy_weight)
    add(
        "--vocab-subset", "score only so many of the most frequent tokens in the loss", type=_positive_int, default=8192
    )
    add("--holdout", "examples kept for measuring, at most a tenth of all", type=_positive_int, default=200)
    add("--init", "start from the target's last layer, or at random", choices=("target", "random"), default="target")
    add("--dtype", "precision of the products", choices=tuple(_DTYPES), default="bfloat16")
    add("--threads", "CPU threads (default: all)", type=_positive_int)
    add("--seed", "of the order, the noise and the first weights", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Train a head as ``args`` say; returns the exit status. Progress goes to stderr."""
    try:
        _Run(args).train()
    except Eagle2Error as error:
        print(f"eagle2 train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. The same command with --resume goes on from here.", file=sys.stderr)
        return 130
    return 0


@dataclass(frozen=True, slots=True)
class _Data:
    """All examples; features are kept for all of them, in this order. The last ``held_out`` are measured only."""

    examples: list[Example]
    store: FeatureStore
    held_out: int

    @property
    def trained(self) -> list[Example]:
        return self.examples[: len(self.examples) - self.held_out]

    def held_out_batches(self, max_tokens: int) -> Iterator[Batch]:
        lengths = [len(example) for example in self.examples]
        indices = range(len(self.examples) - self.held_out, len(self.examples))
        for batch in epoch_order(lengths, indices, max_tokens, seed=0):
            yield make_batch(self.examples, batch, self.store.__getitem__)


class _Run:
    def __init__(self, args: argparse.Namespace) -> None:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        self._args = args
        self._work: Path = args.work or args.out.with_name(args.out.name + ".work")
        self._dtype = _DTYPES[args.dtype]
        self._recipe = Recipe(
            epochs=args.epochs,
            learning_rate=args.lr,
            batch_tokens=args.batch_tokens,
            noise=args.noise,
            rollout=args.rollout,
            rollout_from=args.rollout_from,
            cross_entropy_weight=args.cross_entropy,
            seed=args.seed,
            mixed=self._dtype == torch.bfloat16,
        )

    def train(self) -> None:
        self._check_work()
        target = FrozenTarget(resolve_target(self._args.target), self._dtype, self._args.max_length)
        data = self._prepare(target)
        subset, covered = frequent_ids(data.trained, target.config.vocab_size, self._args.vocab_subset)
        config = head_config(target.config, bias=False, max_length=self._args.max_length)
        head = self._new_head(target, config, data.store[0])
        trainer = Trainer(
            head,
            data.trained,
            data.store.__getitem__,
            target.embedding,
            Scorer.of(target.lm_head, subset, self._dtype),
            self._recipe,
            self._work,
        )
        progress = Progress("training")
        progress.say(
            f"{len(data.trained)} examples to train on, {data.held_out} held out; {trainer.steps} steps, "
            f"{trainer.step} of them done; the loss scores {len(subset)} tokens, {covered:.1%} of the answers."
        )
        for report in trainer.run():
            progress.show(report.step, report.steps, _note(report))
            if report.ends_epoch:
                agreement = measure_agreement(
                    head, data.held_out_batches(self._recipe.batch_tokens), target.embedding, target.lm_head
                )
                progress.say(f"epoch {report.epoch + 1}: {agreement}")
                if self._is_best(report.step, agreement):
                    card = model_card(self._describe(data, report.step, len(subset), target), agreement)
                    write_head(self._args.out, config, head.state_dict(), card)
        progress.say(f"The best head is in {self._args.out}.")

    def _check_work(self) -> None:
        begun = (self._work / STATE).is_file()
        if begun and not self._args.resume:
            raise ConfigError(f"{self._work} holds a run already; add --resume to go on with it, or remove it.")
        if (self._args.out / "model.safetensors").exists() and not begun:
            raise ConfigError(f"{self._args.out} holds a head already; name another folder for the new one.")
        if self._args.resume and not begun and not self._work.is_dir():
            raise ConfigError(f"{self._work} holds no run to resume.")

    def _prepare(self, target: FrozenTarget) -> _Data:
        args = self._args
        encoder_folder = target.folder
        examples = read_examples(
            args.data, target.config.vocab_size, lambda: ChatEncoder.from_folder(encoder_folder), args.max_length
        )
        random.Random(args.seed).shuffle(examples)
        # A tenth at most, so that small files train at all.
        held_out = min(args.holdout, len(examples) // 10)
        if held_out == 0:
            raise ConfigError(f"{args.data} has {len(examples)} examples; training needs 10, to hold one out.")
        tokens = sum(len(example) for example in examples)
        size = tokens * target.config.hidden_size * 2
        features = self._work / "features"
        self._work.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._work).free
        if size > free and not features.is_dir():
            raise ConfigError(f"The features need {size / 1e9:.1f} GB; {self._work} has {free / 1e9:.1f} GB left.")
        store = FeatureStore(features, examples, target.config.hidden_size, target.source)
        if store.num_done < len(examples):
            progress = Progress("features")
            store.compute(target.features, progress.show)
        return _Data(examples, store, held_out)

    def _new_head(self, target: FrozenTarget, config: dict[str, object], sample: Tensor) -> DraftHead:
        write_atomically(self._work / "config.json", json.dumps(config).encode())
        head = DraftHead(DraftConfig.from_folder(self._work))
        initialise(head, torch.Generator().manual_seed(self._args.seed))
        if self._args.init == "target":
            initialise_from_target(head, target.last_layer, target.final_norm, sample)
        return head

    def _is_best(self, step: int, agreement: Agreement) -> bool:
        """Record this measurement; whether it beats all earlier ones of the run."""
        path = self._work / "history.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        # A run that was killed after measuring and before saving its state measures the same step again.
        earlier = [entry for entry in map(json.loads, lines) if entry["step"] < step]
        entry = {
            "step": step,
            "chain_tau": agreement.chain_tau,
            "regression": agreement.regression,
            "top1": agreement.top1,
            "topk": agreement.topk,
        }
        write_atomically(path, "".join(json.dumps(e) + "\n" for e in [*earlier, entry]).encode())
        return all(agreement.chain_tau > e["chain_tau"] for e in earlier)

    def _describe(self, data: _Data, step: int, scored: int, target: FrozenTarget) -> Training:
        return Training(
            target=self._args.target,
            data=self._args.data.name,
            examples=len(data.trained),
            answer_tokens=sum(example.num_answer_tokens for example in data.trained),
            held_out=data.held_out,
            steps=step,
            recipe=self._recipe,
            scored_tokens=scored,
            vocab_size=target.config.vocab_size,
        )


def _note(report: StepReport) -> str:
    def joined(values: Sequence[float]) -> str:
        return "/".join(f"{value:.3f}" for value in values)

    return f"regression {joined(report.regression)}  cross-entropy {joined(report.cross_entropy)}"


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


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return value
