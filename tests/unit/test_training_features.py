"""Features on disk: what was computed comes back, after a kill too, and never for other data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle2.errors import ConfigError
from eagle2.models.tiny import write_tiny_target
from eagle2.training import features as features_module
from eagle2.training.data import Example
from eagle2.training.features import FeatureStore
from eagle2.training.target import FrozenTarget

EXAMPLES = [Example(np.arange(1, n, dtype=np.int32), ((1, n - 1),)) for n in (4, 9, 3, 7)]
H = 6


def feature(ids: torch.Tensor) -> torch.Tensor:
    return ids[:, None] * torch.arange(1, H + 1)


def features(texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [feature(ids) for ids in texts]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes after the first two examples and after the next two; the longer of two texts has a pass of its own."""
    monkeypatch.setattr(features_module, "_WINDOW_TOKENS", 9)
    monkeypatch.setattr(features_module, "_BATCH_TOKENS", 13)


class KilledError(Exception):
    pass


def test_features_come_back_as_they_were_computed(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, EXAMPLES, H, "a target")
    heard: list[tuple[int, int]] = []
    store.compute(features, lambda done, total: heard.append((done, total)))
    assert heard == [(11, 19), (19, 19)]
    for i in (2, 0, 3, 1):
        assert torch.equal(store[i].float(), feature(torch.from_numpy(EXAMPLES[i].ids)).float())


@pytest.mark.parametrize("torn", [b"", b"\x01\x02\x03"])
def test_a_killed_computation_goes_on(tmp_path: Path, torn: bytes) -> None:
    calls = 0

    def dies(texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KilledError
        return features(texts)

    with pytest.raises(KilledError):
        FeatureStore(tmp_path, EXAMPLES, H, "a target").compute(dies)
    for name in ("features.bin", "features.index"):
        with (tmp_path / name).open("ab") as file:
            file.write(torn)
    store = FeatureStore(tmp_path, EXAMPLES, H, "a target")
    assert store.num_done == 2
    store.compute(dies)
    assert calls == 4, "two examples were left, and fit one pass"
    for i, example in enumerate(EXAMPLES):
        assert torch.equal(store[i].float(), feature(torch.from_numpy(example.ids)).float())


def test_values_that_never_reached_the_disk_are_computed_again(tmp_path: Path) -> None:
    FeatureStore(tmp_path, EXAMPLES, H, "a target").compute(features)
    with (tmp_path / "features.bin").open("r+b") as file:
        file.truncate(12 * H * 2)
    store = FeatureStore(tmp_path, EXAMPLES, H, "a target")
    assert store.num_done == 2
    store.compute(features)
    assert torch.equal(store[3].float(), feature(torch.from_numpy(EXAMPLES[3].ids)).float())


def test_other_data_and_other_targets_are_refused(tmp_path: Path) -> None:
    FeatureStore(tmp_path, EXAMPLES, H, "a target").compute(features)
    with pytest.raises(ConfigError, match="another examples"):
        FeatureStore(tmp_path, EXAMPLES[:3], H, "a target")
    with pytest.raises(ConfigError, match="another source"):
        FeatureStore(tmp_path, EXAMPLES, H, "another target")


def test_the_target_gives_the_state_that_its_lm_head_scores(tmp_path: Path) -> None:
    """A feature times the lm_head must be the next-token logits that ``transformers`` computes."""
    folder = write_tiny_target(tmp_path / "target")
    target = FrozenTarget(folder, torch.float32, 64)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for length in (1, 17, 64, 30):
        ids = torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            wanted = reference(ids[None]).logits[0]
        torch.testing.assert_close(target.features([ids])[0] @ target.lm_head.T, wanted, rtol=1e-4, atol=1e-4)
    texts = [torch.arange(5), torch.arange(40), torch.arange(17)]
    for text, rows in zip(texts, target.features(texts), strict=True):
        torch.testing.assert_close(rows, target.features([text])[0], rtol=1e-4, atol=1e-4)
    assert target.final_norm.shape == (64,)
    assert "input_layernorm.weight" in target.last_layer
    with pytest.raises(ConfigError, match="4096 tokens do not fit the target's context of 2048"):
        FrozenTarget(folder, torch.float32, 4096)
