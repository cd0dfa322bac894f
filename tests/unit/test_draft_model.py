"""The draft head's forward against the layer written out, and rows whose bits depend on nothing beside them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle2.models.checkpoint import DraftConfig, TargetConfig, load_tensors
from eagle2.models.draft import DraftModel
from eagle2.models.layers import inverse_frequencies
from eagle2.models.linear import packs
from eagle2.models.target import TargetModel
from eagle2.models.tiny import TOKENIZER_SIZE, write_tiny_head, write_tiny_target
from tests.pooled import Nodes, Pooled, Span, random_parents

DTYPES = [torch.float32, torch.bfloat16]
HIDDEN = 96


def write(folder: Path, *, bias: bool = True, qkv_bias: bool = False, tied: bool = False) -> tuple[Path, Path]:
    target = write_tiny_target(
        folder / "target", hidden_size=HIDDEN, num_heads=6, num_kv_heads=2, num_layers=1, tie_word_embeddings=tied,
        tokenizer=False, seed=1,
    )  # fmt: skip
    return target, write_tiny_head(folder / "head", target, bias=bias, qkv_bias=qkv_bias, seed=2)


def load(target_folder: Path, head_folder: Path, dtype: torch.dtype) -> DraftModel:
    target = TargetModel(TargetConfig.from_folder(target_folder), load_tensors(target_folder), dtype=dtype)
    config = DraftConfig.from_folder(head_folder)
    return DraftModel(config, load_tensors(head_folder), target.embedding, target.head_weight, dtype=dtype)


def draw(seed: int, length: int, dtype: torch.dtype = torch.float32) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, TOKENIZER_SIZE, (length,), generator=generator).tolist()
    return tokens, torch.randn(length, HIDDEN, generator=generator).to(dtype)


def written_out(head: Path, target: Path, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
    """One Llama layer without input norm over fc(embedding, feature), then the target's lm_head; float64."""
    w = {name: tensor.double() for name, tensor in load_tensors(head).items()}
    t = {name: tensor.double() for name, tensor in load_tensors(target).items()}
    config = DraftConfig.from_folder(head)
    embedding = t["model.embed_tokens.weight"]
    x = torch.cat([embedding[tokens], features.double()], dim=1) @ w["fc.weight"].T + w.get("fc.bias", 0)
    length, dim, group = len(tokens), config.head_dim, config.num_heads // config.num_kv_heads

    def heads(name: str) -> Tensor:
        projected = x @ w[f"layers.0.self_attn.{name}.weight"].T + w.get(f"layers.0.self_attn.{name}.bias", 0)
        return projected.view(length, -1, dim)

    angles = torch.outer(torch.arange(length).double(), inverse_frequencies(config.rope, dim).double())
    cos, sin = angles.cos().repeat(1, 2).unsqueeze(1), angles.sin().repeat(1, 2).unsqueeze(1)

    def turned(states: Tensor) -> Tensor:
        low, high = states.chunk(2, dim=-1)
        return states * cos + torch.cat([-high, low], dim=-1) * sin

    q, k, v = turned(heads("q_proj")), turned(heads("k_proj")), heads("v_proj")
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v).flatten(1)
    x = x + mixed @ w["layers.0.self_attn.o_proj.weight"].T
    normed = x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
    normed = normed * w["layers.0.post_attention_layernorm.weight"]
    gate, up = normed @ w["layers.0.mlp.gate_proj.weight"].T, normed @ w["layers.0.mlp.up_proj.weight"].T
    x = x + (F.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T
    return x, x @ t.get("lm_head.weight", embedding).T


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DraftModel:
    if not packs(torch.empty(2, 2, dtype=request.param)):
        pytest.skip(f"this CPU has no instructions for {request.param}")
    return load(*write(tmp_path_factory.mktemp("pair")), request.param)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_outputs_are_those_of_the_layer_written_out(bias: bool, qkv_bias: bool, tied: bool, tmp_path: Path) -> None:
    target, head = write(tmp_path, bias=bias, qkv_bias=qkv_bias, tied=tied)
    pooled = Pooled(load(target, head, torch.float32))
    draws = [draw(1, 90), draw(2, 40)]
    outputs = pooled.forward(*(Span(pooled.table(), tokens, features) for tokens, features in draws))
    for (tokens, features), output in zip(draws, outputs, strict=True):
        expected, logits = written_out(head, target, tokens, features)
        torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(pooled.model.logits(output).double(), logits, atol=1e-4, rtol=0)


def test_rows_in_chunks_are_rows_at_once(model: DraftModel) -> None:
    tokens, features = draw(3, 150, model.dtype)
    whole, chunked = Pooled(model), Pooled(model, seed=1)
    (expected,) = whole.forward(Span(whole.table(), tokens, features))
    table, other = chunked.table(), chunked.table()
    parts = []
    while len(table) < 150:
        begin = len(table)
        end = begin + 1 + begin % 7
        beside = draw(begin, 3, model.dtype)
        span = Span(table, tokens[begin:end], features[begin:end])
        parts.append(chunked.forward(Span(other, *beside), span)[1])
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(model.logits(torch.cat(parts)), model.logits(expected))


@pytest.mark.parametrize("length", [0, 1, 5, 63, 64, 65, 127, 128])
def test_beam_rows_are_the_rows_of_their_path_alone(model: DraftModel, length: int) -> None:
    """Level by level as in an expansion: no root, several nodes of the first level, siblings and other sequences."""
    parents = [-1 if i < 4 else p for i, p in enumerate(random_parents(np.random.default_rng(length), 20))]
    tokens, features = draw(length + 1, 20, model.dtype)
    context = draw(length, length, model.dtype)
    busy = Pooled(model)
    table, other = busy.table(), busy.table()
    if length:
        busy.forward(Span(table, *context))
    busy.forward(Span(other, *draw(7, 70, model.dtype)))
    tree = Nodes(table, tokens, parents, features)
    neighbour_tokens, neighbour_features = draw(8, 3, model.dtype)
    output = busy.forward(Nodes(other, neighbour_tokens, [-1, -1, 1], neighbour_features), tree)[1]
    plain = Pooled(model, num_slots=8192, seed=1)
    spans = []
    for node in range(20):
        path = tree.path(node)
        text = [*context[0], *(tokens[i] for i in path)]
        spans.append(Span(plain.table(), text, torch.cat([context[1], features[path]])))
    expected = torch.stack([rows[-1] for rows in plain.forward(*spans)])
    assert torch.equal(output, expected)
    assert torch.equal(model.logits(output), model.logits(expected))
