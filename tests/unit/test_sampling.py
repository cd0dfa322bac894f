"""Sampling: lossless by enumeration, processors as in transformers, noise that is random and yet fixed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle2.models.linear import packs
from eagle2.speculative import sampling
from eagle2.speculative.accept import Choose, accept
from eagle2.speculative.cycle import cycle
from eagle2.speculative.draft import TreeShape
from eagle2.speculative.sampling import (
    TokenCounts,
    TokenRule,
    choose_token,
    gumbel_noise,
    penalised,
    probabilities,
    truncated,
)
from eagle2.speculative.tree import NO_NODE, Tree
from tests.golden_pair import GOLDEN, PooledDrafter, PooledTarget, load_head, load_target

Text = tuple[int, ...]
TOP_SEED = 2**64 - 1


# --- Exact enumeration over a small vocabulary ---------------------------------------------------------------


class SmallTarget:
    """Random logits as a function of the text so far, and the request's rule on them."""

    def __init__(self, seed: int, vocab: int, rule: TokenRule) -> None:
        self.seed, self.vocab, self.rule = seed, vocab, rule
        self._known: dict[Text, Tensor] = {}

    def next_token(self, text: Text) -> Tensor:
        """Distribution (V,) float64 after the root and ``text``."""
        if text not in self._known:
            self._known[text] = self._distribution(text)
        return self._known[text]

    def _distribution(self, text: Text) -> Tensor:
        generator = np.random.default_rng([self.seed, *(token + 1 for token in text)])
        logits = torch.from_numpy(2 * generator.standard_normal(self.vocab)).float()
        counts = TokenCounts.of_prompt([0], self.vocab).with_path(list(text))
        return probabilities(logits, self.rule, counts).double()

    def joint(self, text: Text) -> float:
        p = 1.0
        for i, token in enumerate(text):
            p *= float(self.next_token(text[:i])[token])
        return p


def random_tree(seed: int, vocab: int, depth: int) -> Tree:
    """Any tree of distinct siblings, good or bad: which tokens it offers has nothing to do with the target."""
    generator = np.random.default_rng(seed)
    tokens, parents, level = [0], [NO_NODE], [0]
    for _ in range(depth):
        below = []
        for parent in level:
            for token in generator.permutation(vocab)[: int(generator.integers(0, vocab + 1))]:
                tokens.append(int(token))
                parents.append(parent)
                below.append(len(tokens) - 1)
        level = list(generator.permutation(below)[:4])
    return Tree(
        torch.tensor([tokens]), torch.tensor([parents]), torch.zeros(1, len(tokens)), torch.tensor([len(tokens)])
    )


def text_at(tree: Tree, node: int) -> Text:
    return tuple(int(tree.tokens[0, n]) for n in tree.paths()[0, node].tolist() if n > 0)


def outcomes(tree: Tree, target: SmallTarget) -> dict[Text, float]:
    """Committed run -> probability, by running ``accept`` for every way in which the target may pick."""
    found: dict[Text, float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        asked: list[int] = []

        def choose(sequences: Tensor, nodes: Tensor, script: list[int] = script, asked: list[int] = asked) -> Tensor:
            asked.append(int(nodes[0]))
            # A walk that goes on past its script stops here: a token that no child carries.
            return torch.tensor([script[len(asked) - 1] if len(asked) <= len(script) else target.vocab])

        done = accept(tree, choose)
        if len(asked) > len(script):
            scripts += [[*script, token] for token in range(target.vocab)]
            continue
        p = 1.0
        for node, token in zip(asked, script, strict=True):
            p *= float(target.next_token(text_at(tree, node))[token])
        found[tuple(done.committed_tokens(tree, 0))] += p
    return found


def sequential(tree: Tree, target: SmallTarget, node: int = 0) -> Iterator[tuple[Text, float]]:
    """The paper's rule for point-mass drafts: offer the children in order, strike out what is rejected."""
    p = target.next_token(text_at(tree, node))
    arrives = 1.0
    for child in range(1, tree.num_nodes):
        if int(tree.parents[0, child]) != node or arrives == 0:
            continue
        token = int(tree.tokens[0, child])
        taken = float(p[token])
        for run, q in sequential(tree, target, child):
            yield (token, *run), arrives * taken * q
        arrives *= 1 - taken
        p = p.clone()
        p[token] = 0
        p = p / p.sum() if float(p.sum()) > 0 else p
    for token in range(target.vocab):
        yield (token,), arrives * float(p[token])


RULES = [
    TokenRule(temperature=1.0),
    TokenRule(temperature=0.6, top_p=0.8),
    TokenRule(temperature=1.7, top_k=2),
    TokenRule(temperature=1.0, min_p=0.2, frequency=0.9, presence=-0.4, repetition=1.3, bias={1: 1.5}),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "depth"), [(5, 1), (5, 2), (4, 3), (3, 3)])
def test_committed_tokens_have_the_targets_distribution(vocab: int, depth: int, rule: TokenRule) -> None:
    for seed in range(4):
        target, tree = SmallTarget(seed, vocab, rule), random_tree(seed + depth, vocab, depth)
        found = outcomes(tree, target)
        assert sum(found.values()) == pytest.approx(1, abs=1e-6)
        # Runs differ in length, so each is compared as a beginning: what is committed, then plain decoding.
        for length in range(1, depth + 2):
            for text in np.ndindex(*[vocab] * length):
                p = sum(
                    q * (target.joint(text) / target.joint(run) if target.joint(run) else 0.0)
                    if len(run) < length
                    else q
                    for run, q in found.items()
                    if run[:length] == text[: len(run)]
                )
                assert p == pytest.approx(target.joint(text), abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_it_is_the_sequential_rule(rule: TokenRule) -> None:
    for seed in range(4):
        target, tree = SmallTarget(seed, 5, rule), random_tree(seed, 5, 2)
        found, expected = outcomes(tree, target), defaultdict(float)
        for run, p in sequential(tree, target):
            expected[run] += p
        for run in {*found, *expected}:
            assert found[run] == pytest.approx(expected[run], abs=1e-6)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    kept = expected > 0
    assert not counts[~kept].any(), "a token without probability was drawn"
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("rule", [RULES[0], RULES[3]])
def test_draws_over_many_seeds_have_the_rules_distribution(rule: TokenRule) -> None:
    draws = 20_000
    logits = torch.tensor([0.3, -1.0, 2.0, 0.9, -0.2])
    counts = TokenCounts.of_prompt([2], 5).with_path([2, 3])
    drawn = torch.zeros(5)
    for seed in range(draws):
        drawn[choose_token(logits, dataclasses.replace(rule, seed=seed), 17, counts)] += 1
    # 18.5 is exceeded once in a thousand times with 4 degrees of freedom.
    assert chi_square(drawn, draws * probabilities(logits, rule, counts)) < 18.5


def test_draws_at_many_positions_of_one_seed_are_independent() -> None:
    """Pairs of neighbouring positions: 25 cells, 24 degrees of freedom, 51.2 once in a thousand times."""
    draws = 20_000
    logits = torch.tensor([0.3, -1.0, 2.0, 0.9, -0.2])
    rule = TokenRule(seed=42, temperature=1.0)
    tokens = [choose_token(logits, rule, position) for position in range(draws)]
    pairs = torch.zeros(5, 5)
    for first, second in zip(tokens[::2], tokens[1::2], strict=True):
        pairs[first, second] += 1
    p = probabilities(logits, rule)
    assert chi_square(pairs.flatten(), draws / 2 * torch.outer(p, p).flatten()) < 51.2


# --- Processors ------------------------------------------------------------------------------------------------


def processed_by_transformers(logits: Tensor, rule: TokenRule) -> Tensor:
    logits_process = pytest.importorskip("transformers").generation.logits_process
    ids = torch.zeros(1, 1, dtype=torch.int64)
    scores = logits_process.TemperatureLogitsWarper(rule.temperature)(ids, logits[None].clone())
    if rule.top_k:
        scores = logits_process.TopKLogitsWarper(rule.top_k)(ids, scores)
    if rule.top_p < 1:
        scores = logits_process.TopPLogitsWarper(rule.top_p)(ids, scores)
    if rule.min_p:
        scores = logits_process.MinPLogitsWarper(rule.min_p)(ids, scores)
    return scores[0]


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([2, 5, 40, 1000]),
    rule=st.builds(
        TokenRule,
        temperature=st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.5, 2.0]),
        top_k=st.sampled_from([0, 1, 2, 7, 50, 5000]),
        top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1, 0.001]),
        min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    ),
)
def test_what_may_be_drawn_is_what_transformers_allows(seed: int, vocab: int, rule: TokenRule) -> None:
    logits = 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    result = truncated(logits, rule)
    assert torch.equal(result, processed_by_transformers(logits, rule))
    assert bool(result.argmax() == logits.argmax())


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits_process = pytest.importorskip("transformers").generation.logits_process
    logits = 3 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    prompt, output = [3, 4, 4, 9], [9, 20, 21]
    processor = logits_process.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([prompt + output]), logits[None].clone())[0]
    counts = TokenCounts.of_prompt(prompt, 50)
    counts.add(output)
    torch.testing.assert_close(penalised(logits, TokenRule(repetition=penalty), counts), expected)


def test_logit_bias_is_that_of_transformers() -> None:
    logits_process = pytest.importorskip("transformers").generation.logits_process
    logits = 3 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    bias = {7: -100.0, 0: 2.5, 49: 100.0, 8: 0.0}
    processor = logits_process.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    expected = processor(torch.tensor([[1, 2]]), logits[None].clone())[0]
    assert torch.equal(penalised(logits, TokenRule(bias=bias), None), expected)
    assert choose_token(logits, TokenRule(bias=bias), 3) == 49


@settings(deadline=None)
@given(
    output=st.lists(st.integers(0, 9), max_size=30),
    presence=st.floats(-2, 2, width=16),
    frequency=st.floats(-2, 2, width=16),
)
def test_presence_and_frequency_count_output_tokens(output: list[int], presence: float, frequency: float) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c counting sampled tokens and not the prompt's."""
    logits = torch.randn(10, generator=torch.Generator().manual_seed(len(output)))
    counts = TokenCounts.of_prompt([1, 1, 2], 10)
    counts.add(output)
    result = penalised(logits, TokenRule(presence=presence, frequency=frequency), counts)
    expected = [float(logits[j]) - output.count(j) * frequency - (output.count(j) > 0) * presence for j in range(10)]
    torch.testing.assert_close(result, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_penalties_leave_the_logits_and_counts_that_they_were_given() -> None:
    logits, counts = torch.zeros(5), TokenCounts.of_prompt([1], 5)
    path = counts.with_path([2, 2])
    assert counts.output.tolist() == [0] * 5
    assert counts.seen.tolist() == [False, True, False, False, False]
    assert path.output.tolist() == [0, 0, 2, 0, 0]
    assert counts.with_path([]) is counts
    rule = TokenRule(temperature=0.5, top_k=1, top_p=0.5, min_p=0.5, frequency=1, repetition=2, bias={3: 1.0})
    choose_token(logits, rule, 3, path)
    assert logits.tolist() == [0] * 5
    assert path.output.tolist() == [0, 0, 2, 0, 0]


@pytest.mark.parametrize("token", [7, 2])
@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        (TokenRule(frequency=0.5), [0.5, 1.0, 1.5]),
        (TokenRule(frequency=-2.0), [-2.0, -4.0, -6.0]),
        (TokenRule(frequency=0.25, presence=0.5), [0.75, 1.0, 1.25]),
        (TokenRule(presence=0.5), [0.5, 0.5, 0.5]),
    ],
)
def test_penalties_grow_along_an_accepted_block(rule: TokenRule, steps: list[float], token: int, before: int) -> None:
    """Flat logits, one block accepts the same token three times; its rejected siblings are never counted.

    With ``before`` earlier outputs of the token the block goes on counting from there.
    """
    # Root, then three times the token, each with siblings 3 and 4 beside it.
    tokens, parents, last = [0], [NO_NODE], 0
    for _ in range(3):
        tokens += [3, token, 4]
        parents += [last] * 3
        last = len(tokens) - 2
    tree = Tree(torch.tensor([tokens]), torch.tensor([parents]), torch.zeros(1, 10), torch.tensor([10]))
    counts = TokenCounts.of_prompt([3, token], 10)
    counts.add([token] * before)
    seen: list[Tensor] = []

    def choose(sequences: Tensor, nodes: Tensor) -> Tensor:
        path = [n for n in tree.paths()[0, int(nodes[0])].tolist() if n > 0]
        seen.append(penalised(torch.zeros(10), rule, counts.with_path(tree.tokens[0, path].tolist())))
        return torch.tensor([token])

    done = accept(tree, choose)
    assert done.committed_tokens(tree, 0) == [token] * 4
    lowered = [-float(logits[token]) for logits in seen]
    expected = [(before + i) * rule.frequency + (before + i > 0) * rule.presence for i in range(4)]
    assert lowered == pytest.approx(expected)
    if before == 0:
        assert lowered[1:] == pytest.approx(steps)
    others = [i for i in range(10) if i != token]
    assert all(not logits[others].any() for logits in seen)


# --- The choice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-6, 1e-37, 1e-40, 1e-300])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
def test_a_temperature_close_to_zero_is_the_arg_max(temperature: float, more: dict[str, Any]) -> None:
    for seed in range(20):
        logits = 5 * torch.randn(30, generator=torch.Generator().manual_seed(seed))
        rule = TokenRule(seed=seed, temperature=temperature, **more)
        assert choose_token(logits, rule, 9) == int(logits.argmax())


def test_plain_greedy_is_told_apart() -> None:
    assert TokenRule(seed=4, top_p=0.5).is_plain_greedy
    for rule in (
        TokenRule(temperature=0.1),
        TokenRule(bias={1: 1.0}),
        TokenRule(presence=-1),
        TokenRule(frequency=1),
        TokenRule(repetition=1.1),
    ):
        assert not rule.is_plain_greedy


def test_greedy_with_a_bias_is_the_arg_max_of_what_is_left() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert choose_token(logits, TokenRule(bias={1: -1.5}), 0) == 2
    assert choose_token(logits, TokenRule(frequency=1.0), 0, TokenCounts.of_prompt([1], 3).with_path([1, 1])) == 2


@pytest.mark.parametrize("rule", [TokenRule(temperature=1.0, top_k=1), TokenRule(temperature=1.0, top_p=1e-9)])
def test_the_likeliest_token_always_stays(rule: TokenRule) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(1))
    assert {choose_token(logits, dataclasses.replace(rule, seed=s), 0) for s in range(30)} == {int(logits.argmax())}


# --- Noise -----------------------------------------------------------------------------------------------------


def plain_noise(seed: int, position: int, token: int) -> float:
    """The same hash in whole numbers of Python."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            value = (value ^ (value >> 33)) * multiplier % 2**64
        return value ^ (value >> 33)

    bits = mix((token + mix((mix(seed) + position) % 2**64)) % 2**64)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


@settings(deadline=None)
@given(seed=st.integers(0, TOP_SEED), position=st.integers(0, 2**20), vocab=st.integers(1, 300))
def test_noise_is_a_pure_function(seed: int, position: int, vocab: int) -> None:
    noise = gumbel_noise(seed, position, vocab)
    assert noise.shape == (vocab,)
    assert noise.dtype == torch.float64
    assert torch.equal(noise, gumbel_noise(seed, position, vocab))
    assert torch.equal(noise, gumbel_noise(seed, position, 500)[:vocab])
    for token in {0, vocab // 2, vocab - 1}:
        assert float(noise[token]) == pytest.approx(plain_noise(seed, position, token), rel=1e-9, abs=1e-9)


def test_noise_differs_by_seed_position_and_token() -> None:
    seeds = [0, 1, 2, 41, 42, 2**32, 2**63 - 1, 2**63, TOP_SEED - 1, TOP_SEED]
    rows = torch.stack([gumbel_noise(seed, position, 2000) for seed in seeds for position in (0, 1, 2, 1000)])
    assert rows.isfinite().all()
    assert len(rows.unique()) == rows.numel()
    # Neither rows nor their shifts by one token, position or seed go together: |r| of 2000 pairs is below 0.09.
    correlations = torch.corrcoef(torch.cat([rows[:, 1:], rows[:, :-1]]))
    correlations.fill_diagonal_(0)
    assert correlations.abs().max() < 0.09


@pytest.mark.parametrize("seed", [0, 1, 42, TOP_SEED])
def test_noise_is_gumbels(seed: int) -> None:
    """Kolmogorov-Smirnov against uniform numbers; 1.95 / sqrt(n) is exceeded once in a thousand times."""
    noise = torch.stack([gumbel_noise(seed, position, 500) for position in range(100)])
    for sample in (noise.flatten(), noise[:, 3], noise[7]):
        uniform = torch.exp(-torch.exp(-sample)).sort().values
        n = len(uniform)
        grid = torch.arange(n, dtype=torch.float64)
        distance = torch.maximum(uniform - grid / n, (grid + 1) / n - uniform).max()
        assert float(distance) < 1.95 / math.sqrt(n)


@pytest.mark.parametrize("bits", [0, -1, 1, 2**63 - 1, -(2**63)])
def test_no_hash_gives_infinite_noise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_mix", lambda value: torch.full_like(value, bits))
    assert gumbel_noise(3, 4, 2).isfinite().all()


# --- Speculation on and off ------------------------------------------------------------------------------------

LENGTH = 24


@dataclasses.dataclass
class Run:
    prompt: list[int]
    rule: TokenRule
    output: list[int] = dataclasses.field(default_factory=list)
    counts: TokenCounts = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.counts = TokenCounts.of_prompt(self.prompt, 320)

    def take(self, tokens: list[int]) -> None:
        self.output += tokens
        self.counts.add(tokens)

    def choose(self, logits: Tensor, path: list[int]) -> int:
        position = len(self.prompt) + len(self.output) + len(path)
        return choose_token(logits, self.rule, position, self.counts.with_path(path))


def start(runs: list[Run], name: str, dtype: torch.dtype) -> PooledTarget:
    target = PooledTarget(load_target(name, dtype), [run.prompt for run in runs])
    for run, logits in zip(runs, target.prompt_logits, strict=True):
        run.take([run.choose(logits, [])])
    return target


def choice_of(runs: list[Run], tree: Tree, logits: Tensor) -> Choose:
    def choose(sequences: Tensor, nodes: Tensor) -> Tensor:
        picked = []
        for b, node in zip(sequences.tolist(), nodes.tolist(), strict=True):
            path = [n for n in tree.paths()[b, node].tolist() if n > 0]
            picked.append(runs[b].choose(logits[b, node], tree.tokens[b, path].tolist()))
        return torch.tensor(picked)

    return choose


def speculated(runs: list[Run], name: str, dtype: torch.dtype, shape: TreeShape) -> float:
    """Fill the runs' outputs by cycles; returns committed tokens a cycle and sequence."""
    target = start(runs, name, dtype)
    drafter = PooledDrafter(load_head(name, target.model, dtype), len(runs))
    features = target.prompt_features
    tokens = [torch.tensor([*run.prompt[1:], run.output[0]]) for run in runs]
    cycles = 0
    while any(len(run.output) < LENGTH for run in runs):
        done = cycle(drafter, target, features, tokens, shape, lambda tree, logits: choice_of(runs, tree, logits))
        for run, fresh in zip(runs, done.tokens, strict=True):
            run.take(fresh.tolist())
        features, tokens, cycles = done.features, done.tokens, cycles + 1
    return sum(len(run.output) - 1 for run in runs) / cycles / len(runs)


def plain(runs: list[Run], name: str, dtype: torch.dtype) -> None:
    target = start(runs, name, dtype)
    for _ in range(LENGTH - 1):
        tree = Tree.of_roots(torch.tensor([run.output[-1] for run in runs]))
        done = accept(tree, choice_of(runs, tree, target.verify(tree)))
        target.commit(done)
        for b, run in enumerate(runs):
            run.take(done.committed_tokens(tree, b))


MIXED = [
    TokenRule(seed=0, temperature=1.0),
    TokenRule(seed=TOP_SEED, temperature=0.7, top_p=0.9),
    TokenRule(seed=3, temperature=1.3, top_k=5),
    TokenRule(seed=4, temperature=0.9, min_p=0.1),
    TokenRule(seed=5, temperature=1.0, frequency=0.8, presence=0.3),
    TokenRule(seed=6, temperature=0.8, repetition=1.3, top_k=20, top_p=0.95, bias={101: 2.0}),
    TokenRule(frequency=-2.0),
    TokenRule(frequency=2.0, repetition=1.2),
]


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("A", torch.float32, TreeShape(5, 1, 6)),
        ("B", torch.float32, TreeShape(3, 4, 16)),
        ("A", torch.bfloat16, TreeShape(3, 4, 16)),
    ],
)
def test_speculation_changes_no_token(name: str, dtype: torch.dtype, shape: TreeShape) -> None:
    """All rules side by side in one batch with trees, against one batch without and each run alone without."""
    if not packs(torch.empty(2, 2, dtype=dtype)):
        pytest.skip(f"this CPU has no instructions for {dtype}")
    record = json.loads((GOLDEN / f"greedy_{name}_small.json").read_text())
    prompts = [run["prompt_ids"] for run in record["runs"]]

    def runs() -> list[Run]:
        return [Run(prompts[i % len(prompts)], rule) for i, rule in enumerate(MIXED)]

    drafted, together, alone = runs(), runs(), runs()
    committed = speculated(drafted, name, dtype, shape)
    assert committed > 1.2, "drafted tokens were accepted"
    plain(together, name, dtype)
    for run in alone[::3]:
        plain([run], name, dtype)
    for i, run in enumerate(drafted):
        assert run.output[:LENGTH] == together[i].output
        if i % 3 == 0:
            assert run.output[:LENGTH] == alone[i].output
    # The seed matters: the same prompt and rule with another one is another text.
    other = [Run(prompts[0], dataclasses.replace(MIXED[0], seed=99)), Run(prompts[0], MIXED[0])]
    plain(other, name, dtype)
    assert other[0].output != other[1].output
    assert other[1].output == together[0].output
