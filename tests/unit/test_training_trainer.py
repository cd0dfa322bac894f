"""The loop: it learns, and a killed run ends with the same weights as one that was left alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle2.errors import ConfigError
from eagle2.models.architecture import DraftConfig
from eagle2.models.tiny import write_tiny_head, write_tiny_target
from eagle2.training.agreement import measure_agreement
from eagle2.training.batches import make_batch
from eagle2.training.data import Example
from eagle2.training.head import DraftHead, initialise
from eagle2.training.loss import Scorer
from eagle2.training.target import FrozenTarget
from eagle2.training.trainer import Recipe, StepReport, Trainer

RECIPE = Recipe(
    epochs=6,
    optimizer="adamw",
    learning_rate=3e-3,
    batch_tokens=128,
    warm_up=5,
    rollout=2,
    rollout_from=0.5,
    mixed=False,
)


class World:
    """A tiny target, sixteen texts that it wrote, and their features."""

    def __init__(self, folder: Path) -> None:
        target_folder = write_tiny_target(folder / "target", hidden_size=32, num_layers=1, head_dim=8)
        self.target = FrozenTarget(target_folder, torch.float32, 64)
        self.head_folder = write_tiny_head(folder / "head", target_folder, bias=False)
        draw = np.random.default_rng(0)
        self.examples = []
        for i in range(16):
            ids = draw.integers(3, 200, 4).tolist()
            while len(ids) < 16 + i % 5:
                # Greedy, so that the text is what the target itself would write.
                last = self.target.features([torch.tensor(ids)])[0][-1]
                ids.append(int((self.target.lm_head @ last).argmax()))
            self.examples.append(Example(np.asarray(ids, dtype=np.int32), ((4, len(ids)),)))
        self.features = self.target.features([torch.from_numpy(example.ids).long() for example in self.examples])

    def head(self) -> DraftHead:
        head = DraftHead(DraftConfig.from_folder(self.head_folder))
        initialise(head, torch.Generator().manual_seed(0))
        return head

    def trainer(
        self,
        folder: Path,
        recipe: Recipe = RECIPE,
        head: DraftHead | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Trainer:
        target, features = self.target, self.features.__getitem__
        scorer = Scorer.of(target.lm_head, None, torch.float32)
        return Trainer(head or self.head(), self.examples, features, target.embedding, scorer, recipe, folder, clock)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def test_the_loss_falls_and_agreement_rises(world: World, tmp_path: Path) -> None:
    head = world.head()
    batches = [make_batch(world.examples, list(range(16)), world.features.__getitem__)]
    before = measure_agreement(head, batches, world.target.embedding, world.target.lm_head)
    reports = list(world.trainer(tmp_path, replace(RECIPE, epochs=25), head).run())
    after = measure_agreement(head, batches, world.target.embedding, world.target.lm_head)
    early, late = (np.mean([report.cross_entropy[0] for report in part]) for part in (reports[:10], reports[-10:]))
    assert late < early - 0.5
    assert after.regression < before.regression * 0.7
    assert after.chain_tau > before.chain_tau + 0.2
    assert after.top1[0] <= after.topk[0] <= 1
    assert [len(report.cross_entropy) for report in (reports[0], reports[-1])] == [1, 2]
    assert sum(report.measure for report in reports) == 25


@pytest.mark.parametrize("stop_after", [1, 7])
def test_a_killed_run_ends_as_one_that_was_left_alone(world: World, tmp_path: Path, stop_after: int) -> None:
    whole = world.trainer(tmp_path / "whole")
    reports = list(whole.run())
    first = world.trainer(tmp_path / "parts")
    seen: list[StepReport] = []
    run = first.run()
    for _ in range(stop_after):
        seen.append(next(run))
    run.close()  # saves, as leaving the loop by an exception does
    second = world.trainer(tmp_path / "parts")
    assert second.step == stop_after
    seen += list(second.run())
    assert seen == reports
    for (name, wanted), got in zip(whole.head.state_dict().items(), second.head.state_dict().values(), strict=True):
        assert torch.equal(wanted, got), name


def test_half_an_update_is_never_saved(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = world.trainer(tmp_path)
    run = trainer.run()
    next(run)
    trainer.save()

    def interrupted() -> None:
        next(iter(trainer.head.parameters())).data.zero_()
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer._optimizers[0], "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(run)
    resumed = world.trainer(tmp_path)
    assert resumed.step == 1
    assert all(parameter.abs().sum() > 0 for parameter in resumed.head.parameters())


def test_the_state_is_saved_as_time_goes_by(world: World, tmp_path: Path) -> None:
    now = 0.0
    trainer = world.trainer(tmp_path)
    trainer._clock = lambda: now
    trainer._saved_at = 0.0
    run = trainer.run()
    next(run)
    next(run)
    assert not (tmp_path / "training_state.pt").exists()
    now = 46.0
    next(run)
    assert world.trainer(tmp_path).step == 2, "the steps that were finished when the clock was looked at"


def test_a_run_with_another_recipe_or_other_data_is_not_continued(world: World, tmp_path: Path) -> None:
    world.trainer(tmp_path).save()
    with pytest.raises(ConfigError, match=r"noise 0\.2, this one has 0\.1"):
        world.trainer(tmp_path, replace(RECIPE, noise=0.1))
    (tmp_path / "training_state.pt").write_bytes(b"no state")
    with pytest.raises(ConfigError, match="cannot be read"):
        world.trainer(tmp_path)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_learning_rate_warms_up_and_falls(schedule: str) -> None:
    recipe = replace(RECIPE, schedule=schedule)
    rates = [recipe.learning_rate_at(step, step / 100) for step in range(100)]
    assert rates[0] == pytest.approx(recipe.learning_rate / 5, rel=0.01)
    assert max(rates) == rates[4] <= recipe.learning_rate
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.04 * recipe.learning_rate


def test_a_constant_learning_rate_stays_after_the_warm_up() -> None:
    recipe = replace(RECIPE, schedule="constant")
    rates = [recipe.learning_rate_at(step, step / 10) for step in range(10)]
    assert rates[4:] == [recipe.learning_rate] * 6
    assert rates[0] == pytest.approx(recipe.learning_rate / 5)


def test_passes_join_one_after_the_other() -> None:
    recipe = replace(RECIPE, rollout=3, rollout_from=0.5)
    assert [recipe.passes_at(n / 8) for n in range(9)] == [1, 1, 1, 1, 2, 2, 3, 3, 3]
    assert [replace(recipe, rollout=1).passes_at(p) for p in (0, 1)] == [1, 1]
    assert [replace(recipe, rollout_from=0).passes_at(p) for p in (0, 0.6, 1)] == [2, 3, 3]
    assert [replace(recipe, rollout_from=1).passes_at(p) for p in (0.99, 1)] == [1, 3]


def test_a_run_by_the_clock_ends_with_it_and_counts_the_hours_of_all_its_parts(world: World, tmp_path: Path) -> None:
    recipe = replace(RECIPE, epochs=1000, hours=1.0)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 60.0
        return now

    first = world.trainer(tmp_path, recipe, clock=clock)
    run = first.run()
    for _ in range(3):
        report = next(run)
    run.close()
    assert 0 < report.progress < 0.9
    assert not report.measure
    second = world.trainer(tmp_path, recipe, clock=clock)
    assert second.progress >= report.progress
    last = list(second.run())[-1]
    assert last.progress == 1.0
    assert last.measure
    assert last.learning_rate < 0.1 * recipe.learning_rate
    assert len(last.cross_entropy) == 2
    assert last.step < 60, "a step takes a minute at least by this clock"


def test_muon_learns_too(world: World, tmp_path: Path) -> None:
    recipe = replace(RECIPE, epochs=10, optimizer="muon", learning_rate=0.01)
    reports = list(world.trainer(tmp_path / "whole", recipe).run())
    assert reports[-1].cross_entropy[0] < reports[0].cross_entropy[0] - 0.3
    parts = world.trainer(tmp_path / "parts", recipe).run()
    next(parts)
    parts.close()
    assert list(world.trainer(tmp_path / "parts", recipe).run()) == reports[1:]


def test_mixed_precision_learns_too(world: World, tmp_path: Path) -> None:
    reports = list(world.trainer(tmp_path, replace(RECIPE, epochs=10, mixed=True)).run())
    assert reports[-1].cross_entropy[0] < reports[0].cross_entropy[0] - 0.3
