"""Number formats and devices: what is refused, and what ``auto`` takes."""

from __future__ import annotations

import pytest
import torch

from eagle2.errors import ModelError
from eagle2.models import dtype as module
from eagle2.models.dtype import resolve_device, resolve_dtype, use_threads
from eagle2.models.linear import packs

CPU = torch.device("cpu")
GPU = torch.device("cuda")


def no_bfloat16(weight: torch.Tensor) -> bool:
    return weight.dtype != torch.bfloat16


def test_float32_is_always_served() -> None:
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("float32", GPU) == torch.float32


def test_float16_is_refused_on_a_cpu_alone() -> None:
    with pytest.raises(ModelError, match=r"^float16 is not served on a CPU; take bfloat16 or float32\.$"):
        resolve_dtype("float16", CPU)
    assert resolve_dtype("float16", GPU) == torch.float16


def test_bfloat16_needs_a_cpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if packs(torch.empty(2, 2, dtype=torch.bfloat16)):
        assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    monkeypatch.setattr(module, "packs", no_bfloat16)
    with pytest.raises(ModelError, match=r"^This CPU has no bfloat16 instructions; take float32\.$"):
        resolve_dtype("bfloat16", CPU)
    assert resolve_dtype("bfloat16", GPU) == torch.bfloat16


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", GPU) == torch.bfloat16
    assert resolve_dtype("auto", CPU) in (torch.float32, torch.bfloat16)
    monkeypatch.setattr(module, "packs", no_bfloat16)
    assert resolve_dtype("auto", CPU) == torch.float32


@pytest.mark.parametrize("faster", [torch.float32, torch.bfloat16])
def test_auto_takes_the_faster_one(faster: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "packs", lambda weight: True)
    monkeypatch.setattr(module, "_linear_seconds", lambda dtypes: {d: 1.0 if d == faster else 1.5 for d in dtypes})
    assert resolve_dtype("auto", CPU) == faster


def test_a_small_difference_does_not_move_auto_away_from_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "packs", lambda weight: True)
    monkeypatch.setattr(module, "_linear_seconds", lambda _: {torch.bfloat16: 1.0, torch.float32: 0.9})
    assert resolve_dtype("auto", CPU) == torch.bfloat16


def test_a_device_that_is_not_here_is_refused_by_name() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ModelError, match="'no such device'"):
        resolve_device("no such device")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="'cuda' cannot be used here"):
            resolve_device("cuda")


def test_threads_are_those_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        use_threads(2)
        assert torch.get_num_threads() == 2
        use_threads(None)
        assert torch.get_num_threads() >= 1
    finally:
        use_threads(before)
    assert torch.get_num_threads() == before
