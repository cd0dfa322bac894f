"""The trainable head against plain computations of the same formulas, and against the head that serves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle2.models.architecture import DraftConfig, TargetConfig
from eagle2.models.checkpoint import check_head, load_tensors
from eagle2.models.draft import DraftModel
from eagle2.models.rows import Rows
from eagle2.models.tiny import write_tiny_head, write_tiny_target
from eagle2.training.checkpoint import head_config, write_head
from eagle2.training.head import DraftHead, initialise, initialise_from_target, shifted

H, HEADS, GROUPS, SIZE = 32, 4, 2, 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_tiny_target(
        folder,
        hidden_size=H,
        intermediate_size=48,
        num_heads=HEADS,
        num_kv_heads=GROUPS,
        head_dim=SIZE,
        rope_theta=500.0,
    )


@pytest.fixture(scope="module", params=[True, False], ids=["bias", "no bias"])
def head(target: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> DraftHead:
    folder = write_tiny_head(tmp_path_factory.mktemp("head"), target, seed=3, bias=request.param)
    made = DraftHead(DraftConfig.from_folder(folder))
    made.load_state_dict(load_tensors(folder))
    return made.requires_grad_(False)


class Plain:
    """One row at a time, in float64, straight from the definition."""

    def __init__(self, head: DraftHead) -> None:
        self.w = {name: tensor.double() for name, tensor in head.state_dict().items()}
        self.theta, self.eps = head.config.rope.theta, head.config.rms_norm_eps

    def rotate(self, x: Tensor, position: int) -> Tensor:
        out = x.clone()
        for j in range(SIZE // 2):
            angle = position * self.theta ** (-2 * j / SIZE)
            a, b = x[:, j], x[:, j + SIZE // 2]
            out[:, j] = a * math.cos(angle) - b * math.sin(angle)
            out[:, j + SIZE // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def row(self, embedding: Tensor, feature: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Output (H,) of a row that sees ``seen`` and itself; appends its own key and value to ``seen``."""
        w, a = self.w, "layers.0.self_attn."
        x = w["fc.weight"] @ torch.cat([embedding, feature]) + w.get("fc.bias", torch.zeros(H).double())
        q = self.rotate((w[a + "q_proj.weight"] @ x).view(HEADS, SIZE), position)
        k = self.rotate((w[a + "k_proj.weight"] @ x).view(GROUPS, SIZE), position)
        seen.append((k, (w[a + "v_proj.weight"] @ x).view(GROUPS, SIZE)))
        mixed = []
        for h in range(HEADS):
            g = h // (HEADS // GROUPS)
            p = torch.softmax(torch.stack([q[h] @ key[g] for key, _ in seen]) / SIZE**0.5, dim=0)
            mixed.append(sum(p[i] * value[g] for i, (_, value) in enumerate(seen)))
        x = x + w[a + "o_proj.weight"] @ torch.cat(mixed)
        y = x / (x.pow(2).mean() + self.eps).sqrt() * w["layers.0.post_attention_layernorm.weight"]
        gate, up = w["layers.0.mlp.gate_proj.weight"] @ y, w["layers.0.mlp.up_proj.weight"] @ y
        return x + w["layers.0.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)


def test_forward_equals_the_plain_computation(head: DraftHead) -> None:
    torch.manual_seed(0)
    embeddings, features = torch.randn(2, 7, H), torch.randn(2, 7, H)
    predicted, passes = head(embeddings, features)
    assert len(passes) == 1
    for b in range(2):
        plain, seen = Plain(head), []  # type: tuple[Plain, list[tuple[Tensor, Tensor]]]
        for i in range(7):
            wanted = plain.row(embeddings[b, i].double(), features[b, i].double(), i, seen)
            torch.testing.assert_close(predicted[b, i].double(), wanted, rtol=1e-4, atol=1e-4)


def test_rollouts_equal_drafting_from_every_row(head: DraftHead) -> None:
    """Draft 3 deep after each prefix, the given tokens taken as right: true context, then the head's own features."""
    torch.manual_seed(1)
    T, depth = 7, 3
    embeddings, features = torch.randn(1, T, H), torch.randn(1, T, H)
    predicted, passes = head(embeddings, features)
    outputs = [predicted]
    for _ in range(depth - 1):
        predicted, passes = head(embeddings, shifted(predicted), passes)
        outputs.append(predicted)
    plain = Plain(head)
    for start in range(T - depth):
        seen: list[tuple[Tensor, Tensor]] = []
        for i in range(start + 1):
            out = plain.row(embeddings[0, i].double(), features[0, i].double(), i, seen)
        for level in range(1, depth):
            i = start + level
            out = plain.row(embeddings[0, i].double(), out, i, seen)
            torch.testing.assert_close(outputs[level][0, i].double(), out, rtol=1e-4, atol=1e-4)


def test_a_row_is_not_moved_by_what_comes_after_it(head: DraftHead) -> None:
    torch.manual_seed(2)
    embeddings, features = torch.randn(1, 6, H), torch.randn(1, 6, H)
    changed = features.clone()
    changed[0, 4:] += 1
    first, second = head(embeddings, features), head(embeddings, changed)
    torch.testing.assert_close(first[0][0, :4], second[0][0, :4])
    again, after = (head(embeddings, shifted(out), passes)[0] for out, passes in (first, second))
    torch.testing.assert_close(again[0, :5], after[0, :5])


def test_it_agrees_with_the_head_that_serves(head: DraftHead, target: Path) -> None:
    torch.manual_seed(3)
    T, tensors = 9, load_tensors(target)
    embedding = tensors["model.embed_tokens.weight"]
    serving = DraftModel(head.config, head.state_dict(), embedding, tensors["lm_head.weight"], dtype=torch.float32)
    tokens, features = torch.randint(0, 200, (T,)), torch.randn(T, H)
    places = torch.arange(T, dtype=torch.int32)
    rows = Rows(
        tokens, places.long(), places, torch.tensor([0, T], dtype=torch.int32), places[None], places + 1,
        torch.zeros(T, 1, dtype=torch.int32), torch.zeros(T, dtype=torch.int32),
    )  # fmt: skip
    served = serving.forward(rows, features, serving.new_pool(T))
    torch.testing.assert_close(head(embedding[tokens][None], features[None])[0][0], served, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_the_checkpoint_is_the_published_format(target: Path, tmp_path: Path, bias: bool) -> None:
    shape = TargetConfig.from_folder(target)
    config = head_config(shape, bias=bias, max_length=128)
    first = write_tiny_head(tmp_path / "shape", target, bias=bias)
    head = DraftHead(DraftConfig.from_folder(first))
    write_head(tmp_path / "head", config, head.state_dict(), "# Card\n")
    stored = load_tensors(tmp_path / "head")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    expected = {
        "fc.weight": (H, 2 * H),
        "layers.0.self_attn.q_proj.weight": (HEADS * SIZE, H),
        "layers.0.self_attn.k_proj.weight": (GROUPS * SIZE, H),
        "layers.0.self_attn.v_proj.weight": (GROUPS * SIZE, H),
        "layers.0.self_attn.o_proj.weight": (H, HEADS * SIZE),
        "layers.0.mlp.gate_proj.weight": (48, H),
        "layers.0.mlp.up_proj.weight": (48, H),
        "layers.0.mlp.down_proj.weight": (H, 48),
        "layers.0.post_attention_layernorm.weight": (H,),
    }
    assert shapes == expected | ({"fc.bias": (H,)} if bias else {})
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    read = DraftConfig.from_folder(tmp_path / "head")
    assert (read.fc_bias, read.rope.theta, read.max_position_embeddings) == (bias, 500.0, 128)
    check_head(read, stored, shape)
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"config.json", "model.safetensors", "README.md"}


def test_starting_from_the_target_copies_its_layer_at_a_tame_size(head: DraftHead, target: Path) -> None:
    tensors = load_tensors(target)
    layer = {
        name.removeprefix("model.layers.1."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    made = DraftHead(head.config)
    initialise(made, torch.Generator().manual_seed(0))
    torch.manual_seed(4)
    sample = torch.randn(20, H) * 3
    initialise_from_target(made, layer, tensors["model.norm.weight"], sample)
    copied = dict(made.named_parameters())
    assert torch.equal(copied["layers.0.mlp.gate_proj.weight"], layer["mlp.gate_proj.weight"])
    with torch.no_grad():
        out, _ = made(torch.zeros(1, 20, H), sample[None])
    assert 0.2 < (out.norm() / sample.norm()).item() < 2.0
