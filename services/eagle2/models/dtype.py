"""Which number format a model runs in."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from eagle2.errors import ModelError
from eagle2.models.linear import Linear, packs

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """``auto`` is a GPU where torch has one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"The device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU, and on a CPU whichever of bfloat16 and float32 is faster (measured now)."""
    if name == "auto":
        return torch.bfloat16 if device.type != "cpu" else _fastest_on_cpu()
    dtype = _NAMES[name]
    if device.type == "cpu" and dtype == torch.float16:
        raise ModelError("float16 is not served on a CPU; take bfloat16 or float32.")
    if device.type == "cpu" and dtype == torch.bfloat16 and not packs(torch.empty(2, 2, dtype=dtype)):
        raise ModelError("This CPU has no bfloat16 instructions; take float32.")
    return dtype


def use_threads(threads: int | None) -> None:
    """Set how many CPU threads operators use; None is all cores that the process may use.

    Of the threads of a process that compute, each must call this: OpenMP keeps the number per thread.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))


def _fastest_on_cpu() -> torch.dtype:
    if not packs(torch.empty(2, 2, dtype=torch.bfloat16)):
        return torch.float32
    seconds = _linear_seconds((torch.bfloat16, torch.float32))
    # Both sides of a pair, and all replicas, decide for themselves: noise must not make them differ.
    return torch.float32 if seconds[torch.float32] < 0.8 * seconds[torch.bfloat16] else torch.bfloat16


def _linear_seconds(
    dtypes: Sequence[torch.dtype], *, layers: int = 16, outputs: int = 2048, inputs: int = 1024, repeats: int = 8
) -> dict[torch.dtype, float]:
    """Best times of a pass through a stack of linear layers at a decoding batch, measured in turns.

    The stack is larger than a core's cache, since a decoding step spends most of its time reading weights from memory.
    """
    weights = [torch.randn(outputs, inputs) for _ in range(layers)]
    stacks = {dtype: [Linear(weight.to(dtype)) for weight in weights] for dtype in dtypes}
    x = torch.randn(8, inputs)
    best = dict.fromkeys(dtypes, float("inf"))
    for _ in range(repeats):
        for dtype, stack in stacks.items():
            rows = x.to(dtype)
            began = time.perf_counter()
            for linear in stack:
                linear(rows)
            best[dtype] = min(best[dtype], time.perf_counter() - began)
    return best
