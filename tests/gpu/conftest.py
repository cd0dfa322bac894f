"""The device that is checked: a GPU, or what EAGLE2_GPU_CHECK_DEVICE names."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    name = os.environ.get("EAGLE2_GPU_CHECK_DEVICE", "cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    return torch.device(name)


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> torch.device:
    """The same, for what has no meaning on a CPU."""
    if device.type != "cuda":
        pytest.skip(f"this is about GPUs, the device is {device}")
    return device
