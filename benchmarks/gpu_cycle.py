"""What a cycle costs beside a plain step at the shapes of Llama 3 8B, with random weights: c, and where the time goes.

    python -m benchmarks.gpu_cycle --out FOLDER [--device cuda] [--tiny]

Weights and contexts are noise, which costs what numbers cost; nothing is said here about acceptance. c is the time of a
cycle (60 nodes, depth 6, top_k 10, 4 rows that the head has to catch up on) divided by that of a plain step of the same
batch. A speculative server gains tau / c.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_pair import DevicePair, limits_for, random_weights
from eagle2.models.architecture import DraftConfig, RopeConfig, TargetConfig
from eagle2.models.draft import DraftModel
from eagle2.models.target import TargetModel
from eagle2.speculative.draft import TreeShape

_CATCH_UP = 4  # rows: a bonus and about three accepted tokens


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shapes of a target, and what is measured on it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    batches: tuple[int, ...]
    shape: TreeShape
    repeats: int


LLAMA_3_8B = Sizes(4096, 14336, 32, 32, 8, 128256, 1024, (1, 4, 16), TreeShape(6, 10, 60), 20)
TINY = Sizes(64, 128, 2, 4, 2, 300, 40, (1, 2), TreeShape(3, 4, 12), 2)


def models(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[TargetModel, DraftModel]:
    dim = sizes.hidden // sizes.heads
    common: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_heads": sizes.heads,
        "num_kv_heads": sizes.kv_heads,
        "head_dim": dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(500000.0, "none"),
        "qkv_bias": False,
    }
    target_config = TargetConfig(
        architecture="LlamaForCausalLM",
        num_layers=sizes.layers,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        sliding_window=None,
        bos_token_id=None,
        eos_token_ids=(),
        **common,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab, sizes.hidden),
        "lm_head.weight": (sizes.vocab, sizes.hidden),
        "model.norm.weight": (sizes.hidden,),
    }
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        shapes |= _layer(prefix, sizes, dim) | {f"{prefix}input_layernorm.weight": (sizes.hidden,)}
    target = TargetModel(target_config, random_weights(shapes, dtype, device), dtype=dtype, device=device)
    shapes = {"fc.weight": (sizes.hidden, 2 * sizes.hidden), **_layer("layers.0.", sizes, dim)}
    head = DraftModel(
        DraftConfig(fc_bias=False, **common),
        random_weights(shapes, dtype, device),
        target.embedding,
        target.head_weight,
        dtype=dtype,
        device=device,
    )
    return target, head


def _layer(prefix: str, sizes: Sizes, dim: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, keys = sizes.hidden, sizes.intermediate, sizes.kv_heads * dim
    return {
        f"{prefix}self_attn.q_proj.weight": (hidden, hidden),
        f"{prefix}self_attn.k_proj.weight": (keys, hidden),
        f"{prefix}self_attn.v_proj.weight": (keys, hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def milliseconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of a call whose end is that of its device work, after three calls that do not count."""
    times = []
    for repeat in range(repeats + 3):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat >= 3:
            times.append(time.perf_counter() - began)
    return 1000 * median(times)


def measure(target: TargetModel, head: DraftModel, sizes: Sizes, batch: int, *, recorded: bool) -> dict[str, float]:
    """Milliseconds of a plain step and of a cycle, their ratio c, and a cycle's phases, each waited for."""
    slots = batch * (sizes.context + sizes.shape.num_nodes + sizes.shape.depth * sizes.shape.top_k)
    limits = limits_for(sizes.shape, batch, 2 * sizes.context) if recorded else None
    pair = DevicePair(target, head, slots, limits)
    pair.start_with_noise(batch, sizes.context, sizes.vocab)
    pair.hold(_CATCH_UP)
    device = target.device
    plain = milliseconds(lambda: pair.plain(commit=False), sizes.repeats, device)
    whole = milliseconds(lambda: pair.cycle(sizes.shape, commit=False), sizes.repeats, device)
    pair.by_phase = True
    pair.seconds.clear()
    for _ in range(sizes.repeats):
        pair.cycle(sizes.shape, commit=False)
    pair.check_integrity()
    phases = {f"{name}_ms": 1000 * seconds / sizes.repeats for name, seconds in sorted(pair.seconds.items())}
    return {"batch": batch, "plain_ms": plain, "cycle_ms": whole, "c": whole / plain, **phases}


def describe(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_cycle.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs")
    args = parser.parse_args()
    device = torch.device(args.device)
    sizes, dtype = (TINY, torch.float32) if args.tiny else (LLAMA_3_8B, torch.bfloat16)
    if args.tiny:
        torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    target, head = models(sizes, dtype, device)
    results: dict[str, Any] = {**describe(device), "dtype": str(dtype), "context": sizes.context, "rows": []}
    shape = f"{sizes.shape.num_nodes}/{sizes.shape.depth}/{sizes.shape.top_k}"
    print(f"{results['device']}, {results['dtype']}, {shape}, context {sizes.context}")
    for batch in sizes.batches:
        for recorded in (True, False):
            row = {"recorded": recorded, **measure(target, head, sizes, batch, recorded=recorded)}
            results["rows"].append(row)
            figures = "  ".join(f"{name} {value:.3f}" for name, value in row.items() if isinstance(value, float))
            print(f"batch {batch:2d} {'graphs' if recorded else 'eager '}  {figures}", flush=True)
            # After every row: a run that is cut off keeps what it has.
            (args.out / "gpu_cycle.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
