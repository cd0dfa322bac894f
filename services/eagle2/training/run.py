"""One training run: from the examples to the best head, with everything that a resumed run needs in between."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle2.config import DType, ModelSettings
from eagle2.engine.assemble import load_checkpoint
from eagle2.errors import ConfigError
from eagle2.evaluation.plots import write_plots
from eagle2.models.architecture import DraftConfig, TargetConfig
from eagle2.models.loader import resolve_draft
from eagle2.training.answers import AnswerSettings, answer_prompts
from eagle2.training.card import Training, model_card
from eagle2.training.checkpoint import STATE, head_config, write_atomically, write_head
from eagle2.training.data import ChatEncoder, Example, read_examples
from eagle2.training.features import FeatureStore
from eagle2.training.head import DraftHead, continue_from, initialise, initialise_from_target
from eagle2.training.held_out import HeldOut, Quality
from eagle2.training.lock import locked
from eagle2.training.loss import Scorer
from eagle2.training.progress import Progress
from eagle2.training.prompts import read_prompts
from eagle2.training.target import FrozenTarget
from eagle2.training.trainer import Recipe, StepReport, Trainer
from eagle2.training.vocabulary import answer_frequencies


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained on what.

    name:         of the target, as the card and the engine shall call it.
    target:       its folder.
    data:         files of conversations that the target wrote.
    prompts:      a file of prompts that the target answers first, or None; the answers stay in ``work``.
    answers:      how it answers them.
    out, work:    folders of the finished head, and of features and state.
    vocab_subset: tokens that the loss scores.
    holdout:      examples kept for measuring, at most a tenth of all.
    questions:    held-out prompts that the engine answers to measure tau; 0: none.
    max_tokens:   of such an answer.
    init:         ``target`` (its last layer), ``random``, or the folder of a head to go on from.
    resume:       whether a run in ``work`` may be continued.
    """

    name: str
    target: Path
    data: tuple[Path, ...]
    prompts: Path | None
    answers: AnswerSettings
    out: Path
    work: Path
    max_length: int
    vocab_subset: int
    holdout: int
    questions: int
    max_tokens: int
    init: str
    dtype: DType
    device: torch.device
    threads: int | None
    resume: bool
    recipe: Recipe


class TrainingRun:
    """Carries out a ``Plan``. Raises ``Eagle2Error`` with one sentence where it cannot."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def train(self) -> None:
        """Train to the end of the recipe; the best head so far is always in ``out``. Progress goes to stderr."""
        self._check_folders()
        with locked(self._plan.work):
            self._train()

    def _train(self) -> None:
        plan, recipe = self._plan, self._plan.recipe
        dtype = getattr(torch, plan.dtype)
        # Read before the target answers anything: that may take hours, and a line may be broken.
        examples = self._read(plan.data)
        examples += self._read(self._answers())
        target = FrozenTarget(plan.target, dtype, plan.max_length, plan.device)
        store, held_out = self._prepare(target, examples)
        trained = examples[: len(examples) - held_out.count]
        vocabulary = answer_frequencies(trained, target.config.vocab_size)
        subset = vocabulary.most_frequent(plan.vocab_subset, target.config.eos_token_ids)
        config = head_config(target.config, bias=False, max_length=plan.max_length)
        head = self._new_head(target, config, store[0])
        scorer = Scorer.of(target.lm_head, subset.to(plan.device), dtype)
        trainer = Trainer(head, trained, store.__getitem__, target.embedding, scorer, recipe, plan.work)
        progress = Progress("training")
        progress.say(
            f"{len(trained)} examples to train on, {held_out.count} held out; at most {trainer.steps} steps, "
            f"{trainer.step} of them done; the loss scores {len(subset)} tokens, "
            f"{vocabulary.coverage(subset):.1%} of the answers."
        )
        losses = _Losses(plan.work / "losses.jsonl", trainer.step)

        def measure() -> None:
            progress.say(f"step {trainer.step}: measuring")
            quality = self._measure(head, config, target, held_out)
            progress.say(f"step {trainer.step}: {quality}")
            if self._is_best(trainer.step, quality):
                training = self._describe(trained, held_out.count, trainer.step, len(subset), target)
                write_head(plan.out, config, head.state_dict(), model_card(training, quality), vocabulary)

        for report in trainer.run():
            losses.add(report)
            progress.show(report.progress, 1.0, _note(report))
            if report.measure:
                measure()
        # A run that was killed while it measured for the last time has no step left, and still no measurement.
        if all(entry["step"] != trainer.step for entry in _entries_before(self._history, trainer.step + 1)):
            measure()
        write_plots({"history": [*_entries(losses.path), *_entries(self._history)]}, plan.out)
        progress.say(f"The best head is in {plan.out}.")

    @property
    def _history(self) -> Path:
        return self._plan.work / "history.jsonl"

    def _check_folders(self) -> None:
        work, out, resume = self._plan.work, self._plan.out, self._plan.resume
        begun = (work / STATE).is_file()
        if begun and not resume:
            raise ConfigError(f"{work} holds a run already; add --resume to go on with it, or remove it.")
        if (out / "model.safetensors").exists() and not begun:
            raise ConfigError(f"{out} holds a head already; name another folder for the new one.")
        if resume and not work.is_dir():
            raise ConfigError(f"{work} holds no run to resume.")

    def _answers(self) -> list[Path]:
        """Have the target answer the prompts, if there are any; the file of what it said."""
        plan = self._plan
        if plan.prompts is None:
            return []
        prompts = read_prompts(plan.prompts, ChatEncoder.from_folder(plan.target).prompt)
        model = ModelSettings(target=str(plan.target), draft=None, dtype=plan.dtype, device=str(plan.device))
        checkpoint = load_checkpoint(model)
        out = plan.work / "answers.jsonl"
        progress = Progress("answers")
        count = answer_prompts(checkpoint, prompts, out, plan.answers, report=progress.show)
        if count.too_long:
            progress.say(f"{count.too_long} of {len(prompts)} prompts were left out: they are too long.")
        return [out]

    def _read(self, files: Sequence[Path]) -> list[Example]:
        plan = self._plan
        vocab_size = TargetConfig.from_folder(plan.target).vocab_size
        return [
            example
            for path in files
            for example in read_examples(
                path, vocab_size, lambda: ChatEncoder.from_folder(plan.target), plan.max_length
            )
        ]

    def _prepare(self, target: FrozenTarget, examples: list[Example]) -> tuple[FeatureStore, HeldOut]:
        """Shuffle the examples, compute their features, and keep the last of them for measuring."""
        plan = self._plan
        random.Random(plan.recipe.seed).shuffle(examples)
        # A tenth at most, so that small files train at all.
        count = min(plan.holdout, len(examples) // 10)
        if count == 0:
            names = ", ".join(str(path) for path in (*plan.data, plan.prompts) if path is not None)
            raise ConfigError(f"{names} has {len(examples)} examples; training needs 10, to hold one out.")
        size = sum(len(example) for example in examples) * target.config.hidden_size * 2
        features = plan.work / "features"
        free = shutil.disk_usage(plan.work).free
        if size > free and not features.is_dir():
            raise ConfigError(f"The features need {size / 1e9:.1f} GB; {plan.work} has {free / 1e9:.1f} GB left.")
        store = FeatureStore(features, examples, target.config.hidden_size, target.source)
        if store.num_done < len(examples):
            store.compute(target.features, Progress("features").show)
        return store, HeldOut(examples, store, count, plan.questions, plan.max_tokens)

    def _new_head(self, target: FrozenTarget, config: dict[str, object], sample: Tensor) -> DraftHead:
        plan = self._plan
        write_atomically(plan.work / "config.json", json.dumps(config).encode())
        head = DraftHead(DraftConfig.from_folder(plan.work))
        initialise(head, torch.Generator().manual_seed(plan.recipe.seed))
        if plan.init == "target":
            initialise_from_target(head, target.last_layer, target.final_norm, sample)
        elif plan.init != "random":
            continue_from(head, resolve_draft(plan.init))
        return head.to(plan.device)

    def _measure(self, head: DraftHead, config: dict[str, Any], target: FrozenTarget, held_out: HeldOut) -> Quality:
        plan = self._plan
        agreement = held_out.agreement(head, target, plan.recipe.batch_tokens)
        candidate = plan.work / "candidate"
        write_head(candidate, config, head.state_dict())
        tau = held_out.tau(candidate, plan.target, plan.dtype, str(plan.device), plan.threads)
        return Quality(agreement, tau)

    def _is_best(self, step: int, quality: Quality) -> bool:
        """Record this measurement; whether it beats all earlier ones of the run."""
        # A run that was killed after measuring and before saving its state measures the same step again.
        earlier = _entries_before(self._history, step)
        agreement = quality.agreement
        entry = {
            "step": step,
            "score": quality.score,
            "tau": quality.tau,
            "chain_tau": agreement.chain_tau,
            "held_out_regression": agreement.regression,
            "top1": agreement.top1,
            "topk": agreement.topk,
        }
        _write_entries(self._history, [*earlier, entry])
        return all(quality.score > e["score"] for e in earlier)

    def _describe(
        self, trained: Sequence[Example], held_out: int, step: int, scored: int, target: FrozenTarget
    ) -> Training:
        return Training(
            target=self._plan.name,
            data=", ".join(path.name for path in (*self._plan.data, self._plan.prompts) if path is not None),
            examples=len(trained),
            answer_tokens=sum(example.num_answer_tokens for example in trained),
            held_out=held_out,
            steps=step,
            recipe=self._plan.recipe,
            scored_tokens=scored,
            vocab_size=target.config.vocab_size,
        )


class _Losses:
    """The loss curve: means over every 50 steps, a line of JSON each."""

    _EVERY = 50

    def __init__(self, path: Path, step: int) -> None:
        """Go on behind ``step``; what a killed run wrote beyond it comes again."""
        self.path = path
        self._entries = _entries_before(path, step + 1)
        self._reports: list[StepReport] = []

    def add(self, report: StepReport) -> None:
        self._reports.append(report)
        if report.step % self._EVERY and report.progress < 1:
            return
        count = len(self._reports)
        self._entries.append(
            {
                "step": report.step,
                "progress": report.progress,
                "learning_rate": report.learning_rate,
                "regression": sum(r.regression[0] for r in self._reports) / count,
                "cross_entropy": sum(r.cross_entropy[0] for r in self._reports) / count,
                "tokens": sum(r.tokens for r in self._reports),
            }
        )
        self._reports = []
        _write_entries(self.path, self._entries)


def _entries(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def _entries_before(path: Path, step: int) -> list[dict[str, Any]]:
    return [entry for entry in _entries(path) if entry["step"] < step]


def _write_entries(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in entries).encode())


def _note(report: StepReport) -> str:
    def joined(values: Sequence[float]) -> str:
        return "/".join(f"{value:.3f}" for value in values)

    return f"step {report.step}  regression {joined(report.regression)}  cross-entropy {joined(report.cross_entropy)}"
