"""The target's forward: the logits of transformers, and rows whose bits depend on nothing beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle2.models.checkpoint import TargetConfig, load_tensors
from eagle2.models.linear import packs
from eagle2.models.target import TargetModel
from eagle2.models.tiny import TOKENIZER_SIZE, write_tiny_target
from tests.pooled import Nodes, Pooled, Span, random_parents

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "llama_attention_bias": {"attention_bias": True},
    "llama_mlp_bias": {"mlp_bias": True},
    "llama_both_biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama_linear_rope": {"rope_scaling": LINEAR},
    "llama_llama3_rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "llama_group_1": {"num_heads": 4, "num_kv_heads": 4},
    "llama_group_3": {"hidden_size": 96, "num_heads": 6, "num_kv_heads": 2},
    "llama_group_4": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 8},
    "llama_wide_heads": {"head_dim": 32},
    "llama_head_of_12": {"head_dim": 12},
    "llama_head_of_6": {"head_dim": 6},
    "mistral": {"architecture": "MistralForCausalLM", "num_layers": 3},
    "mistral_wide_heads": {"architecture": "MistralForCausalLM", "head_dim": 24, "rope_theta": 1e6},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen2_tied": {"architecture": "Qwen2ForCausalLM", "tie_word_embeddings": True, "rope_scaling": LINEAR},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32},
    "qwen3_biased": {"architecture": "Qwen3ForCausalLM", "attention_bias": True, "tie_word_embeddings": True},
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]
# Around the borders of the 64-position blocks that attention sums in.
CONTEXTS = [0, 1, 5, 63, 64, 65, 127, 128, 200]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> TargetModel:
    return TargetModel(TargetConfig.from_folder(folder), load_tensors(folder), dtype=dtype)


def random_text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, TOKENIZER_SIZE, length).tolist()


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert not expected.isnan().any()
    assert torch.equal(actual, expected), f"largest difference {(actual.float() - expected.float()).abs().max():.3g}"


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    if not packs(torch.empty(2, 2, dtype=request.param)):
        pytest.skip(f"this CPU has no instructions for {request.param}")
    folder = write_tiny_target(tmp_path_factory.mktemp("target"), num_heads=6, num_kv_heads=2, tokenizer=False)
    return load(folder, request.param)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_target(tmp_path / "target", tokenizer=False, **CASES[case])
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    texts = [random_text(1, 150), random_text(2, 150)]
    with torch.no_grad():
        expected = reference(torch.tensor(texts)).logits
    pooled = Pooled(load(folder))
    features = pooled.forward(*(Span(pooled.table(), text) for text in texts))
    for rows, logits in zip(features, expected, strict=True):
        torch.testing.assert_close(pooled.model.logits(rows), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_bfloat16_is_float32_within_its_rounding(architecture: str, tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "target", architecture=architecture, dtype=torch.bfloat16, tokenizer=False)
    logits = []
    for dtype in DTYPES:
        pooled = Pooled(load(folder, dtype))
        (features,) = pooled.forward(Span(pooled.table(), random_text(3, 100)))
        assert features.dtype == dtype
        logits.append(pooled.model.logits(features))
    exact, rounded = logits
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().max() < 0.1 * exact.std()
    assert (exact - rounded).abs().mean() < 0.02 * exact.std()


@pytest.mark.parametrize("seed", range(3))
def test_prefill_in_chunks_is_prefill_at_once(model: TargetModel, seed: int) -> None:
    texts = [random_text(seed, 201), random_text(seed + 10, 90)]
    whole = Pooled(model)
    expected = [whole.forward(Span(whole.table(), text))[0] for text in texts]
    chunked = Pooled(model, seed=seed + 1)
    tables = [chunked.table() for _ in texts]
    generator = np.random.default_rng(seed)
    parts: list[list[Tensor]] = [[], []]
    while any(len(table) < len(text) for table, text in zip(tables, texts, strict=True)):
        spans = {}
        for i, (table, text) in enumerate(zip(tables, texts, strict=True)):
            size = int(generator.choice([1, 2, 3, 17, 33, 64]))
            if len(table) < len(text):
                spans[i] = Span(table, text[len(table) : len(table) + size])
        for i, features in zip(spans, chunked.forward(*spans.values()), strict=True):
            parts[i].append(features)
    for pieces, features in zip(parts, expected, strict=True):
        assert_same_bits(torch.cat(pieces), features)
        assert_same_bits(model.logits(torch.cat(pieces)), model.logits(features))


def test_decoding_one_by_one_is_prefill(model: TargetModel) -> None:
    text = random_text(4, 201)
    whole, single = Pooled(model), Pooled(model, seed=1)
    (expected,) = whole.forward(Span(whole.table(), text))
    expected_logits = model.logits(expected)
    table = single.table()
    for position, token in enumerate(text):
        # As a span and as a tree of the root alone, the two ways in which a token is decoded.
        node = Nodes(table, [token], [-1])
        (alone,) = single.forward(node)
        single.drop(node)
        (features,) = single.forward(Span(table, [token]))
        assert_same_bits(features[0], expected[position])
        assert_same_bits(alone[0], expected[position])
        assert_same_bits(model.logits(features)[0], expected_logits[position])


def check_nodes(model: TargetModel, context: list[int], nodes: tuple[list[int], list[int]], seed: int) -> None:
    """Every node of a tree, in a batch with others, has the bits of a text that ends with it."""
    tokens, parents = nodes
    busy = Pooled(model, num_slots=4096, seed=seed)
    tables = busy.start(context, random_text(seed + 1, 70), random_text(seed + 2, 3))
    tree = Nodes(tables[0], tokens, parents)
    neighbour = Nodes(tables[1], random_text(seed + 3, 5), [-1, 0, 0, 1, 3])
    _, features, _, _ = busy.forward(
        neighbour, tree, Span(tables[2], random_text(seed + 4, 7)), Span(busy.table(), [1])
    )
    plain = Pooled(model, num_slots=16384, seed=seed + 5)
    texts = [[*context, *(tokens[i] for i in tree.path(node))] for node in range(len(tokens))]
    expected = torch.stack([rows[-1] for rows in plain.forward(*(Span(plain.table(), text) for text in texts))])
    assert_same_bits(features, expected)
    assert_same_bits(model.logits(features), model.logits(expected))


@pytest.mark.parametrize("length", CONTEXTS)
def test_tree_nodes_are_plain_decoding_of_their_paths(model: TargetModel, length: int) -> None:
    parents = random_parents(np.random.default_rng(length), 23)
    check_nodes(model, random_text(length, length), (random_text(length + 1, 23), parents), length)


@pytest.mark.parametrize("length", [0, 60, 64])
def test_a_path_may_span_several_blocks(model: TargetModel, length: int) -> None:
    """A chain of 70, and a second branch from its middle, whose nodes stand after the first one's."""
    parents = [*range(-1, 69), 30, *range(70, 80)]
    check_nodes(model, random_text(length, length), (random_text(length + 1, 81), parents), length)


def test_siblings_that_are_not_numbers_stay_alone(model: TargetModel) -> None:
    """A token whose embedding is broken spoils the nodes below it, and neither its siblings nor other sequences."""
    good, bad = random_text(6, 8), 3
    embedding = model.embedding.clone()
    good = [token if token != bad else 4 for token in good]
    context = [token if token != bad else 4 for token in random_text(7, 60)]
    pooled = Pooled(model)
    first, second = pooled.start(context, context)
    tree = Nodes(first, good, [-1, 0, 1, 1, 0, 4, 5, 5])
    (expected,) = pooled.forward(tree)
    pooled.drop(tree)
    broken = [*good]
    broken[1], broken[7] = bad, bad
    try:
        model.embedding[bad] = torch.nan
        features, beside = pooled.forward(Nodes(first, broken, tree.parents), Nodes(second, good, tree.parents))
    finally:
        model.embedding.copy_(embedding)
    spoilt = [1, 2, 3, 7]
    whole = [0, 4, 5, 6]
    assert features[spoilt].isnan().all()
    assert_same_bits(features[whole], expected[whole])
    assert_same_bits(beside, expected)


THREADED = """
import sys
from pathlib import Path
import torch
from eagle2.models.checkpoint import TargetConfig, load_tensors
from eagle2.models.target import TargetModel
from tests.pooled import Nodes, Pooled, Span

torch.set_num_threads(2)
folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
model = TargetModel(TargetConfig.from_folder(folder), load_tensors(folder), dtype=dtype)
generator = torch.Generator().manual_seed(5)
text = torch.randint(0, 4096, (70,), generator=generator).tolist()
pooled = Pooled(model, num_slots=8192)
(expected,) = pooled.forward(Span(pooled.table(), text))
logits = model.logits(expected)
tables = pooled.start(*(text[: n // 2] for n in range(2, 72)))
fresh = [text[(n + 40) % 70] for n in range(70)]
together = Nodes(pooled.table(), fresh, [-1] * 70)
alone = []
for table, token in zip(tables, fresh):
    node = Nodes(table, [token], [-1])
    alone.append(pooled.forward(node)[0])
    pooled.drop(node)
alone = torch.cat(alone)
for rows in range(1, 71):
    table = pooled.table()
    (features,) = pooled.forward(Span(table, text[:rows]))
    assert torch.equal(features, expected[:rows]), f"prefill of {rows} rows"
    assert torch.equal(model.logits(features), logits[:rows]), f"logits of {rows} rows"
    table.free()
    nodes = [Nodes(table, [token], [-1]) for table, token in zip(tables[:rows], fresh)]
    assert torch.equal(torch.cat(pooled.forward(*nodes)), alone[:rows]), f"decoding of {rows} sequences"
    for node in nodes:
        pooled.drop(node)
print("same bits with", torch.get_num_threads(), "threads")
"""


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_rows_keep_their_bits_with_two_threads(dtype: torch.dtype, tmp_path: Path) -> None:
    """Sizes of a real model, at which the linear layers run other kernels for other row counts; work cut in two."""
    if not packs(torch.empty(2, 2, dtype=dtype)):
        pytest.skip(f"this CPU has no instructions for {dtype}")
    folder = write_tiny_target(
        tmp_path / "target", hidden_size=576, intermediate_size=1536, num_layers=1, num_heads=9, num_kv_heads=3,
        head_dim=64, vocab_size=4096, tokenizer=False,
    )  # fmt: skip
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "NUMBA_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait are slow on a busy machine
        "PYTHONPATH": f"{root / 'services'}{os.pathsep}{root}",
    }
    name = str(dtype).removeprefix("torch.")
    done = subprocess.run(
        [sys.executable, "-c", THREADED, str(folder), name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "same bits with 2 threads"
