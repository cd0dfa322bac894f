"""What bit-exact steps cost on a CPU: this engine's forward beside the fastest plain one that promises no bits.

    python benchmarks/exactness_cost.py [--dtype bfloat16] [--threads 2] [--rounds 15] [--cpu-time]

The other forward has the same weights, packed for oneDNN and called with any number of rows, torch's norms and gating,
keys and values in one piece, and ``scaled_dot_product_attention`` with a mask where there is a tree. Steps of 1 row and
of a tree of 10 behind contexts of 200, 1,000 and 4,000 tokens take turns; the least of all rounds counts.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.profile import Sequence, least
from eagle2.config import load_settings
from eagle2.engine.assemble import load_checkpoint
from eagle2.evaluation.machine import Conditions
from eagle2.evaluation.report import conditions_lines
from eagle2.models.architecture import TargetConfig
from eagle2.models.attention import rotated
from eagle2.models.dtype import use_threads
from eagle2.models.layers import RotaryTable, Weights
from eagle2.models.target import TargetModel

_CONTEXTS, _TREE = (200, 1000, 4000), 10


class PackedWeight:
    """y = x W^T by oneDNN with as many rows as there are."""

    def __init__(self, *weights: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights).contiguous(), 1)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")  # type: ignore[no-any-return]


class InexactModel:
    """A Llama forward of one sequence whose rows may depend on each other's number, without its head."""

    def __init__(self, config: TargetConfig, weights: Weights, dtype: torch.dtype) -> None:
        self._config = config
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self._embedding, self._norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self._rotary = RotaryTable(config.rope, config.head_dim, 8192, torch.device("cpu"))
        self._layers = []
        for i in range(config.num_layers):
            own = {name: weights[f"model.layers.{i}.{name}.weight"] for name in _NAMES}
            linears = [
                PackedWeight(*(own[f"self_attn.{name}_proj"] for name in "qkv")),
                PackedWeight(own["self_attn.o_proj"]),
                PackedWeight(own["mlp.gate_proj"], own["mlp.up_proj"]),
                PackedWeight(own["mlp.down_proj"]),
            ]
            self._layers.append((own["input_layernorm"], own["post_attention_layernorm"], linears))
        shape = (config.num_layers, 1, config.num_kv_heads, 8192, config.head_dim)
        self._keys, self._values = (torch.randn(shape).to(dtype) for _ in range(2))

    @torch.inference_mode()
    def forward(self, tokens: Tensor, depths: Tensor, mask: Tensor | None, context: int) -> Tensor:
        config, rows = self._config, len(tokens)
        end = context + rows
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        cos, sin = self._rotary.at(context + depths)
        x = self._embedding[tokens]
        for index, (before, behind, (qkv, output, gate_up, down)) in enumerate(self._layers):
            split = qkv(F.rms_norm(x, before.shape, before, config.rms_norm_eps)).view(rows, -1, dim)
            q, k, v = split.split([heads, kv_heads, kv_heads], dim=1)
            q, k = rotated(q, cos, sin).to(x.dtype), rotated(k, cos, sin).to(x.dtype)
            keys, values = self._keys[index, :, :, :end], self._values[index, :, :, :end]
            keys[0, :, context:], values[0, :, context:] = k.transpose(0, 1), v.transpose(0, 1)
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0), keys, values, attn_mask=mask, enable_gqa=True
            )
            x = x + output(attended[0].transpose(0, 1).reshape(rows, -1))
            gate, up = gate_up(F.rms_norm(x, behind.shape, behind, config.rms_norm_eps)).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * up)
        return F.rms_norm(x, self._norm.shape, self._norm, config.rms_norm_eps)


_NAMES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    use_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    checkpoint = load_checkpoint(load_settings(flags={"model": {"dtype": args.dtype}}, environ=False).model)
    exact = TargetModel(checkpoint.config, checkpoint.weights, dtype=checkpoint.dtype, max_positions=8192)
    other = InexactModel(checkpoint.config, checkpoint.weights, checkpoint.dtype)
    print(f"{args.dtype}, a forward in ms:\n")
    print("| context | step | exact | other | exact / other |\n|---:|---|---:|---:|---:|")
    for context in _CONTEXTS:
        sequence = Sequence(exact, context)
        for size, name in ((1, "plain"), (_TREE, f"tree of {_TREE}")):
            rows = sequence.tree(size)
            depths = torch.arange(size).clamp(max=1)
            seen = torch.ones(size, context + size, dtype=torch.bool)
            seen[:, context + 1 :] = torch.eye(size, dtype=torch.bool)[:, 1:]
            mask = torch.zeros(seen.shape, dtype=checkpoint.dtype).masked_fill(~seen, -torch.inf)
            found = least(
                {
                    "exact": partial(exact.forward, rows, sequence.pool),
                    "other": partial(other.forward, rows.tokens, depths, mask if size > 1 else None, context),
                },
                args.rounds,
                clock,
            )
            mine, its = 1000 * found["exact"], 1000 * found["other"]
            print(f"| {context} | {name} | {mine:.1f} | {its:.1f} | {mine / its:.2f} |")
    method = f"least of {args.rounds} rounds{', processor time' if args.cpu_time else ''}"
    print(f"\n{conditions_lines(Conditions.now(load), method=method)}")


if __name__ == "__main__":
    main()
