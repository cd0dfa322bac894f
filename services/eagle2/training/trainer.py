"""The training loop: deterministic given its seed, and going on after a kill as if nothing had happened."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle2.errors import ConfigError
from eagle2.training.batches import Batch, epoch_order, make_batch
from eagle2.training.checkpoint import load_state, save_state
from eagle2.training.data import Example
from eagle2.training.head import DraftHead, KeyValues, shifted
from eagle2.training.loss import Scorer, distillation_loss

# A kill loses at most the work since the last state was written.
SAVE_EVERY_S = 45.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. Changing any of it changes the result, so a resumed run must have the same.

    batch_tokens: padded tokens of one step.
    noise:        width of the uniform noise on input features, at 512 tokens; longer text gets less.
    rollout:      passes over each batch: 1 uses true features only, 2 and more feed predictions back.
    rollout_from: share of the steps after which the extra passes begin; before it there is one pass.
    warm_up:      steps of linear growth before the learning rate falls along a cosine to 2 % of its peak.
    mixed:        bfloat16 products on float32 weights; else all float32.
    """

    epochs: int = 5
    learning_rate: float = 1e-3
    batch_tokens: int = 2048
    noise: float = 0.2
    rollout: int = 3
    rollout_from: float = 0.5
    cross_entropy_weight: float = 0.1
    warm_up: int = 100
    gradient_clip: float = 0.5
    seed: int = 0
    mixed: bool = True

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Learning rate of ``step`` (from 0) of ``steps``."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up) * (0.02 + 0.98 * cosine)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did, the ``step``-th of ``steps``.

    regression, cross_entropy: losses of each pass, true features first.
    tokens:                    size of the batch, padding counted.
    """

    step: int
    steps: int
    epoch: int
    learning_rate: float
    regression: tuple[float, ...]
    cross_entropy: tuple[float, ...]
    tokens: int
    ends_epoch: bool


class Trainer:
    """Trains ``head`` on the answers of ``examples``.

    features:   index of an example -> (T, H).
    embedding:  (V, H), the target's; never trained.
    scorer:     the target's lm_head, or its most frequent rows.
    folder:     where the state goes. A state that is there already is continued.
    Raises ``ConfigError`` where that state was made with another recipe or other data.
    """

    def __init__(
        self,
        head: DraftHead,
        examples: Sequence[Example],
        features: Callable[[int], Tensor],
        embedding: Tensor,
        scorer: Scorer,
        recipe: Recipe,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.head, self.recipe, self.step = head, recipe, 0
        self._examples, self._features, self._embedding, self._scorer = examples, features, embedding, scorer
        self._folder, self._clock = folder, clock
        lengths, everything = [len(example) for example in examples], range(len(examples))
        self._epochs = [
            epoch_order(lengths, everything, recipe.batch_tokens, recipe.seed * 1009 + epoch)
            for epoch in range(recipe.epochs)
        ]
        self.steps = sum(len(batches) for batches in self._epochs)
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95))
        self._saved_at = clock()
        self._between_steps = True
        self._resume()

    def run(self) -> Iterator[StepReport]:
        """Take the remaining steps one by one, saving the state as time goes by, when it ends and when it is left."""
        step = 0
        try:
            for epoch, batches in enumerate(self._epochs):
                for n, batch in enumerate(batches, start=1):
                    if step == self.step:
                        rows = make_batch(self._examples, batch, self._features)
                        yield self._take(rows, epoch, ends_epoch=n == len(batches))
                        if self._clock() - self._saved_at > SAVE_EVERY_S:
                            self.save()
                    step += 1
        finally:
            # Interrupted within an update, the weights are neither of this step nor of the next.
            if self._between_steps:
                self.save()

    def save(self) -> None:
        """Write the state that a later ``Trainer`` with the same arguments goes on from."""
        save_state(
            self._folder,
            {
                "step": self.step,
                "head": self.head.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "run": self._identity(),
            },
        )
        self._saved_at = self._clock()

    def _take(self, batch: Batch, epoch: int, ends_epoch: bool) -> StepReport:
        recipe = self.recipe
        rate = recipe.learning_rate_at(self.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        passes = recipe.rollout if self.step >= recipe.rollout_from * self.steps else 1
        self.optimizer.zero_grad(set_to_none=True)
        total, regression, cross_entropy = self._loss(batch, passes)
        total.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), recipe.gradient_clip)
        self._between_steps = False
        self.optimizer.step()
        self.step += 1
        self._between_steps = True
        return StepReport(
            self.step, self.steps, epoch, rate, regression, cross_entropy, batch.next_ids.numel(), ends_epoch
        )

    def _loss(self, batch: Batch, num_passes: int) -> tuple[Tensor, tuple[float, ...], tuple[float, ...]]:
        recipe, device = self.recipe, self._embedding.device
        embedded = self._embedding[batch.next_ids.to(device)]
        inputs = self._noisy(batch.features).to(device)
        passes: KeyValues = ()
        losses = []
        with self._precision():
            for n in range(num_passes):
                counted = batch.counted(n).to(device)
                if not bool(counted.any()):
                    break
                predicted, passes = self.head(embedded, inputs.to(embedded.dtype), passes)
                truth = batch.targets.to(device)[counted]
                losses.append(distillation_loss(predicted[counted], truth, self._scorer, recipe.cross_entropy_weight))
                inputs = shifted(predicted)
        total = torch.stack([loss.total for loss in losses]).sum()
        return total, tuple(loss.regression for loss in losses), tuple(loss.cross_entropy for loss in losses)

    def _noisy(self, features: Tensor) -> Tensor:
        # A generator of its own for each step: a resumed run draws what an uninterrupted one would have drawn.
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
        width = self.recipe.noise * 512 / features.shape[1]
        return features.float() + (torch.rand(features.shape, generator=generator) - 0.5) * width

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._embedding.device.type, torch.bfloat16) if self.recipe.mixed else nullcontext()

    def _identity(self) -> dict[str, Any]:
        tokens = sum(len(example) for example in self._examples)
        scored = len(self._scorer.rows)
        return {**asdict(self.recipe), "examples": len(self._examples), "tokens": tokens, "scored tokens": scored}

    def _resume(self) -> None:
        state = load_state(self._folder)
        if state is None:
            return
        for key, value in self._identity().items():
            found = state["run"].get(key)
            if found != value:
                raise ConfigError(
                    f"{self._folder} holds a run with {key} {found!r}, this one has {value!r}; name another folder, or "
                    "remove it to begin again."
                )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])
