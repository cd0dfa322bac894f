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
from eagle2.training.loss import Loss, Scorer, distillation_loss

# A kill loses at most the work since the last state was written.
SAVE_EVERY_S = 45.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. Changing any of it changes the result, so a resumed run must have the same.

    epochs:        passes over the data, at most.
    hours:         how long to train at most, over all resumed parts; None: until the epochs are done. The learning rate
                   and the rollout follow whichever of the two is nearer to its end, so a run that the clock ends is
                   as complete as one that its epochs end.
    optimizer:     ``adamw``, or ``muon`` for the matrices (vectors still get AdamW).
    learning_rate: the peak. Muon's updates are scaled to the size of AdamW's, so the same values fit.
    schedule:      ``cosine`` or ``linear`` fall to 2 % of the peak behind the warm-up, or ``constant``.
    warm_up:       steps of linear growth at the start.
    batch_tokens:  padded tokens of one step.
    noise:         width of the uniform noise on input features, at 512 tokens; longer text gets less.
    rollout:       passes over each batch: 1 uses true features only, 2 and more feed predictions back.
    rollout_from:  share of the run after which the extra passes join, one after the other at even distances.
    mixed:         bfloat16 products on float32 weights; else all float32.
    """

    epochs: int = 10
    hours: float | None = None
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    warm_up: int = 100
    batch_tokens: int = 2048
    noise: float = 0.2
    rollout: int = 3
    rollout_from: float = 0.35
    regression_weight: float = 1.0
    cross_entropy_weight: float = 0.1
    gradient_clip: float = 0.5
    seed: int = 0
    mixed: bool = True

    def learning_rate_at(self, step: int, progress: float) -> float:
        """Learning rate of ``step`` (from 0), with ``progress`` (0 to 1) of the run behind it."""
        fallen = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up) * (0.02 + 0.98 * fallen[self.schedule])

    def passes_at(self, progress: float) -> int:
        """Passes over a batch with ``progress`` (0 to 1) of the run behind it."""
        if progress < self.rollout_from or self.rollout == 1:
            return 1
        share = (progress - self.rollout_from) / (1 - self.rollout_from) if self.rollout_from < 1 else 1.0
        return min(self.rollout, 2 + int(share * (self.rollout - 1)))


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did, the ``step``-th of at most ``steps``.

    progress:                  how much of the run is done, 0 to 1.
    regression, cross_entropy: losses of each pass, true features first.
    tokens:                    size of the batch, padding counted.
    measure:                   the epoch or the run ends here: time to look how good the head is.
    """

    step: int
    steps: int
    epoch: int
    progress: float
    learning_rate: float
    regression: tuple[float, ...]
    cross_entropy: tuple[float, ...]
    tokens: int
    measure: bool


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
        self._optimizers = _optimizers(head, recipe)
        # Seconds of training before this part of the run, and when this part began.
        self._elapsed_before, self._began, self._saved_at = 0.0, clock(), clock()
        self._between_steps = True
        self._resume()

    @property
    def progress(self) -> float:
        """How much of the run is done, 0 to 1: by steps or by hours, whichever is further."""
        share = self.step / self.steps
        if self.recipe.hours is not None:
            share = max(share, self._elapsed / (3600 * self.recipe.hours))
        return min(1.0, share)

    @property
    def _elapsed(self) -> float:
        return self._elapsed_before + self._clock() - self._began

    def run(self) -> Iterator[StepReport]:
        """Take the remaining steps one by one, saving the state as time goes by, when it ends and when it is left."""
        step = 0
        if self.progress >= 1:
            return
        try:
            for epoch, batches in enumerate(self._epochs):
                for n, batch in enumerate(batches, start=1):
                    if step == self.step:
                        rows = make_batch(self._examples, batch, self._features)
                        report = self._take(rows, epoch, ends_epoch=n == len(batches))
                        yield report
                        if report.progress >= 1:
                            return
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
                "elapsed": self._elapsed,
                "head": self.head.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                "run": self._identity(),
            },
        )
        self._saved_at = self._clock()

    def _take(self, batch: Batch, epoch: int, ends_epoch: bool) -> StepReport:
        progress = self.progress
        rate = self.recipe.learning_rate_at(self.step, progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch, self.recipe.passes_at(progress))
        loss.total.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), self.recipe.gradient_clip)
        self._between_steps = False
        for optimizer in self._optimizers:
            optimizer.step()
        self.step += 1
        self._between_steps = True
        progress = self.progress
        return StepReport(
            step=self.step,
            steps=self.steps,
            epoch=epoch,
            progress=progress,
            learning_rate=rate,
            regression=loss.regression,
            cross_entropy=loss.cross_entropy,
            tokens=batch.next_ids.numel(),
            measure=ends_epoch or progress >= 1,
        )

    def _loss(self, batch: Batch, num_passes: int) -> Loss:
        recipe, device = self.recipe, self._embedding.device
        embedded = self._embedding[batch.next_ids.to(device)]
        inputs = self._noisy(batch.features).to(device)
        passes: KeyValues = ()
        answer = batch.answer.to(device)
        predictions: list[Tensor] = []
        counted: list[Tensor] = []
        with self._precision():
            for n in range(num_passes):
                rows = batch.counted(n).to(device)
                if not bool(rows.any()):
                    break
                predicted, passes = self.head(embedded, inputs.to(embedded.dtype), passes)
                predictions.append(predicted[answer])
                counted.append(rows[answer])
                inputs = shifted(predicted)
            return distillation_loss(
                predictions,
                batch.targets.to(device)[answer],
                self._scorer,
                torch.stack(counted),
                regression_weight=recipe.regression_weight,
                cross_entropy_weight=recipe.cross_entropy_weight,
            )

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
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = int(state["step"])
        self._elapsed_before = float(state["elapsed"])


def _optimizers(head: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    rate, betas = recipe.learning_rate, (0.9, 0.95)
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW(head.parameters(), lr=rate, betas=betas)]
    assert recipe.optimizer == "muon", f"no optimizer {recipe.optimizer!r}"
    matrices = [parameter for parameter in head.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in head.parameters() if parameter.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(vectors, lr=rate, betas=betas)]
