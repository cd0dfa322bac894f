"""Recorded runs of the official EAGLE-2 code, and plain decoding, against what the device gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_pair import DevicePair, limits_for
from eagle2.models.checkpoint import DraftConfig, TargetConfig, load_tensors
from eagle2.models.draft import DraftModel
from eagle2.models.target import TargetModel
from eagle2.speculative.draft import TreeShape

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parent.parent / "golden"
SCORE_TOLERANCE = 5e-4
# Logits of the recorded targets lie between -20 and 20; bfloat16 keeps eight bits of them.
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def pair_of(record: dict[str, Any], prompts: int, dtype: torch.dtype, device: torch.device, graphs: bool) -> DevicePair:
    target_folder, head_folder = (GOLDEN / record[name] for name in ("target", "head"))
    target = TargetModel(
        TargetConfig.from_folder(target_folder), load_tensors(target_folder), dtype=dtype, device=device
    )
    head = DraftModel(
        DraftConfig.from_folder(head_folder),
        load_tensors(head_folder),
        target.embedding,
        target.head_weight,
        dtype=dtype,
        device=device,
    )
    limits = limits_for(shape_of(record), prompts, 400, prompt_rows=400) if graphs else None
    return DevicePair(target, head, 8192, limits)


def shape_of(record: dict[str, Any]) -> TreeShape:
    return TreeShape(depth=record["tree_levels"], top_k=record["top_k"], num_nodes=record["total_token"])


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["greedy_A_small", "greedy_A_eagle2_default", "greedy_B_eagle2_default"])
def test_trees_and_tokens_are_the_recorded_ones(device: torch.device, name: str, graphs: bool) -> None:
    """Float32: every tree, every accepted path, every token of all runs, side by side in one batch."""
    if device.type == "cpu" and not (graphs and name == "greedy_A_small"):
        pytest.skip("the CPU has tests of its own")
    record = read(name)
    runs = record["runs"]
    pair = pair_of(record, len(runs), torch.float32, device, graphs)
    assert pair.start([run["prompt_ids"] for run in runs]) == [run["first_root"] for run in runs]
    cycles = max(run["num_cycles"] for run in runs)
    for number in range(cycles if device.type == "cuda" else 3):
        done = pair.cycle(shape_of(record))
        for b, run in enumerate(runs):
            if number >= run["num_cycles"]:
                continue
            expected, size = run["cycles"][number], int(done.tree.sizes[b])
            assert done.tree.tokens[b, :size].tolist() == expected["tokens"], f"run {b}, cycle {number}"
            assert done.tree.parents[b, :size].tolist() == expected["parents"]
            scores = torch.tensor(expected["scores"])
            torch.testing.assert_close(done.tree.scores[b, :size], scores, atol=SCORE_TOLERANCE, rtol=0)
            path = [node for node in done.acceptance.path[b].tolist() if node >= 0]
            assert path == expected["accepted_nodes"]
            assert int(done.acceptance.bonus[b]) == expected["next_root"]
    pair.check_integrity()


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
def test_speculation_changes_no_token_but_at_a_tie(device: torch.device, dtype: torch.dtype) -> None:
    """Where a run leaves plain decoding, the two tokens were as close as rounding is large; the gap is printed."""
    if device.type == "cpu" and dtype != torch.float32:
        pytest.skip("the CPU has tests of its own")
    record = read("greedy_A_small")
    prompts = [run["prompt_ids"] for run in record["runs"]]
    count = 60 if device.type == "cuda" else 6
    plain = pair_of(record, len(prompts), dtype, device, graphs=True)
    plain.start(prompts)
    for _ in range(count):
        plain.plain()
    pair = pair_of(record, len(prompts), dtype, device, graphs=True)
    pair.start(prompts)
    while min(len(tokens) - len(prompt) for tokens, prompt in zip(pair.tokens, prompts, strict=True)) < count:
        pair.cycle(shape_of(record))
    for b, prompt in enumerate(prompts):
        end = len(prompt) + count
        ours, theirs = pair.tokens[b][:end], plain.tokens[b][:end]
        if ours == theirs:
            continue
        at = next(i for i in range(end) if ours[i] != theirs[i])
        again = pair_of(record, 1, dtype, device, graphs=False)
        again.start([theirs[:at]])
        logits = again.target.logits(again.target.features_of(again.tables[0].slots[-1:]).to(device))[0]
        gap = abs(float(logits[ours[at]] - logits[theirs[at]]))
        print(f"{dtype}: prompt {b} leaves plain decoding at token {at - len(prompt)}, gap {gap:.4f}")
        assert gap < CLOSE[dtype]
