"""The recorded runs of the official EAGLE-2 code: every tree, parent, score, accepted path and output."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle2.speculative.accept import Choose, greedy
from eagle2.speculative.cycle import Cycle, cycle
from eagle2.speculative.draft import TreeShape, expand, select
from eagle2.speculative.sampling import TokenRule, probabilities
from eagle2.speculative.tree import Tree
from golden_pair import GOLDEN, PooledDrafter, PooledTarget, load_head, load_target

GREEDY = sorted(path.stem for path in GOLDEN.glob("greedy_*.json"))
SAMPLED = sorted(path.stem for path in GOLDEN.glob("sample_*.json"))
SCORE_TOLERANCE = 2e-4


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return content


def shape_of(record: dict[str, Any]) -> TreeShape:
    return TreeShape(depth=record["tree_levels"], top_k=record["top_k"], num_nodes=record["total_token"])


def start(record: dict[str, Any], runs: list[dict[str, Any]]) -> tuple[PooledDrafter, PooledTarget]:
    target = load_target(record["target"][-1])
    head = load_head(record["head"][-1], target)
    return PooledDrafter(head, len(runs)), PooledTarget(target, [run["prompt_ids"] for run in runs])


def first_rows(target: PooledTarget, runs: list[dict[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    """The first cycle's rows: all of the prompt, tokens one ahead and the root last."""
    tokens = [torch.tensor([*run["prompt_ids"][1:], run["first_root"]]) for run in runs]
    return target.prompt_features, tokens


def check_tree(tree: Tree, b: int, expected: dict[str, Any]) -> None:
    assert tree.tokens[b].tolist() == expected["tokens"]
    assert tree.parents[b].tolist() == expected["parents"]
    assert tree.depths()[b].tolist() == expected["depth"]
    torch.testing.assert_close(tree.scores[b], torch.tensor(expected["scores"]), atol=SCORE_TOLERANCE, rtol=0)
    leaves = {tuple(n for n in row if n >= 0) for row in expected["retrieve_indices"]}
    paths = {tuple(n for n in path if n >= 0) for path in tree.paths()[b].tolist()}
    assert leaves <= paths


def check_acceptance(done: Cycle, b: int, expected: dict[str, Any]) -> None:
    path = [n for n in done.acceptance.path[b].tolist() if n >= 0]
    assert path == expected["accepted_nodes"]
    assert int(done.acceptance.counts[b]) == expected["accept_length"]
    assert done.tree.tokens[b, path].tolist() == expected["committed_tokens"]
    assert int(done.acceptance.bonus[b]) == expected["next_root"]


def test_all_recorded_files_are_here() -> None:
    assert (len(GREEDY), len(SAMPLED)) == (7, 8)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_runs_all_at_once(name: str) -> None:
    """All runs of a file side by side in one batch; a run that is over goes on unobserved until the last one ends."""
    record = read(name)
    runs = record["runs"]
    drafter, target = start(record, runs)
    assert target.prompt_logits.argmax(1).tolist() == [run["first_root"] for run in runs]
    features, tokens = first_rows(target, runs)
    output: list[list[int]] = [[] for _ in runs]
    for step in range(max(run["num_cycles"] for run in runs)):
        lengths = [len(table) for table in target.tables]
        done = cycle(drafter, target, features, tokens, shape_of(record), lambda _, logits: greedy(logits.argmax(2)))
        for b, run in enumerate(runs):
            if step >= run["num_cycles"]:
                continue
            expected = run["cycles"][step]
            assert lengths[b] == expected["context_len"] == expected["draft_kv_len_before_tree"]
            check_tree(done.tree, b, expected)
            check_acceptance(done, b, expected)
            assert len(target.tables[b]) == expected["target_kv_len_after"]
            output[b] += expected["committed_tokens"]
        features, tokens = done.features, done.tokens
    target.pool.check_integrity(table.slots for table in target.tables)
    for ids, run in zip(output, runs, strict=True):
        assert ids == run["output_ids"] == run["hf_greedy_ids"][: len(ids)]


@pytest.mark.parametrize("name", GREEDY[:3])
def test_a_run_alone_gives_the_same_trees(name: str) -> None:
    record = read(name)
    run = record["runs"][1]
    drafter, target = start(record, [run])
    features, tokens = first_rows(target, [run])
    for expected in run["cycles"]:
        done = cycle(drafter, target, features, tokens, shape_of(record), lambda _, logits: greedy(logits.argmax(2)))
        check_tree(done.tree, 0, expected)
        check_acceptance(done, 0, expected)
        features, tokens = done.features, done.tokens


class Replay:
    """One recorded cycle's draws. ``left`` is what the cycle's last token was drawn from."""

    def __init__(self, rule: TokenRule, expected: dict[str, Any]) -> None:
        self.draws = list(expected["draws"])
        self.left = torch.empty(0)
        self._rule, self._next_root = rule, expected["next_root"]

    def choice(self, tree: Tree, logits: Tensor) -> Choose:
        return lambda _, nodes: torch.tensor([self._token(tree, logits, int(nodes[0]))])

    def _token(self, tree: Tree, logits: Tensor, node: int) -> int:
        p = probabilities(logits[0, node], self._rule)
        level = int(tree.depths()[0, node]) + 1
        while self.draws and self.draws[0]["level"] == level:
            draw = self.draws.pop(0)
            token: int = draw["token"]
            assert token in tree.tokens[0, tree.parents[0] == node].tolist()
            assert float(p[token]) == pytest.approx(draw["p"], abs=1e-5)
            assert draw["accepted"] == (draw["r"] <= float(p[token]))
            if draw["accepted"]:
                return token
            p[token] = 0
            p = p / p.sum()
        self.left = p
        return int(self._next_root)


@pytest.mark.parametrize("name", SAMPLED)
def test_recorded_draws_replayed(name: str) -> None:
    """The sequential rule with the recorded random numbers, on probabilities that are computed here.

    At each node the drafted children are offered in order: child x is taken if r <= p(x), else x is struck out and p
    renormalised. The last draw of a cycle, from what is left, is given by the record.
    """
    record = read(name)
    recorded_p = load_file(GOLDEN / f"{name}.safetensors")
    rule = TokenRule(
        temperature=record["temperature"], top_p=record["top_p"] or 1.0, top_k=int(record["sampling_top_k"])
    )
    for run in record["runs"]:
        drafter, target = start(record, [run])
        features, tokens = first_rows(target, [run])
        for expected in run["cycles"]:
            replay = Replay(rule, expected)
            done = cycle(drafter, target, features, tokens, shape_of(record), replay.choice)
            draws, left = replay.draws, replay.left
            assert not draws, "every recorded draw was used"
            check_tree(done.tree, 0, expected)
            check_acceptance(done, 0, expected)
            key = f"p{run['prompt_index']}.c{expected['cycle']}.sample_p"
            torch.testing.assert_close(left, recorded_p[key], atol=2e-5, rtol=0)
            assert float(left[expected["next_root"]]) == pytest.approx(expected["sample_p_of_next_root"], abs=2e-5)
            features, tokens = done.features, done.tokens


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("debug_*.safetensors")))
def test_inner_values_of_the_first_cycles(name: str) -> None:
    """Features, all candidates with their parents, the selection, the mask and the logits, before any decision."""
    debug = load_file(GOLDEN / f"{name}.safetensors")
    record = read(name.replace("debug", "greedy"))
    run = record["runs"][0]
    shape = shape_of(record)
    drafter, target = start(record, [run])
    torch.testing.assert_close(target.prompt_features[0], debug["p0.prefill_feature"], atol=1e-4, rtol=0)
    features, tokens = first_rows(target, [run])
    for step in range(2):
        prefix = f"p0.c{step}."
        output, logits = drafter.extend(features, tokens)
        torch.testing.assert_close(output[0], debug[prefix + "draft_last_hidden"], atol=1e-4, rtol=0)
        candidates = expand(drafter, output, logits, shape)
        assert candidates.tokens[0].tolist() == debug[prefix + "all_tokens"].tolist()
        torch.testing.assert_close(candidates.scores[0], debug[prefix + "all_scores"], atol=SCORE_TOLERANCE, rtol=0)
        # Recorded per group of K candidates, 0 for the root, else one more than the flat index.
        groups = candidates.parents[0, :: shape.top_k] + 1
        assert groups.tolist() == debug[prefix + "group_parents"].tolist()
        selected = select(candidates, shape.num_nodes - 1)
        assert selected[0].tolist() == debug[prefix + "selected_flat_index"].tolist()

        done = cycle(
            ReplayDrafter(drafter, output, logits), target, features, tokens, shape,
            lambda _, logits: greedy(logits.argmax(2)),
        )  # fmt: skip
        assert torch.equal(done.tree.ancestors()[0], debug[prefix + "tree_mask"].bool())
        features, tokens = done.features, done.tokens


class ReplayDrafter:
    """A drafter whose rows are already in its cache."""

    def __init__(self, drafter: PooledDrafter, output: Tensor, logits: Tensor) -> None:
        self._drafter, self._last = drafter, (output, logits)
        for level in drafter._levels:
            drafter.pool.release(level.reshape(-1))
        drafter._levels = []

    def extend(self, features: list[Tensor], tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self._last

    def step(self, tokens: Tensor, features: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        return self._drafter.step(tokens, features, ancestors)
