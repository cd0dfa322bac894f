"""Tiny checkpoints: readable by transformers, different by seed, and not degenerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle2.errors import ModelError
from eagle2.models.checkpoint import DraftConfig, TargetConfig, check_head, load_tensors
from eagle2.models.tiny import TOKENIZER_SIZE, write_tiny_head, write_tiny_target
from eagle2.text.chat import ChatTemplate
from eagle2.text.tokenizer import Tokenizer

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_every_tensor(architecture: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_target(tmp_path / "target", architecture=architecture, tie_word_embeddings=tied)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == architecture
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_outputs_depend_on_the_context_and_are_neither_flat_nor_certain(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(write_tiny_target(tmp_path / "target"))
    ids = torch.randint(3, TOKENIZER_SIZE, (16, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logp = model(ids).logits[:, -1].log_softmax(-1)
        ids[:, 0] = 3 + (ids[:, 0] - 3 + 1) % (TOKENIZER_SIZE - 3)  # another first token, far from the last
        moved = model(ids).logits[:, -1].log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1).mean()
    assert 0.5 < entropy < 5.0
    assert len(set(logp.argmax(-1).tolist())) > 4
    assert (logp - moved).abs().amax(-1).min() > 1e-3


def test_seeds_and_dtypes(tmp_path: Path) -> None:
    first, again, other = (
        load_tensors(write_tiny_target(tmp_path / name, seed=seed, dtype=torch.bfloat16))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert all(tensor.dtype == torch.bfloat16 for tensor in first.values())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_tokenizer_and_the_vocabulary(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "padded", vocab_size=TOKENIZER_SIZE + 22)
    config, tokenizer, template = (kind.from_folder(folder) for kind in (TargetConfig, Tokenizer, ChatTemplate))
    assert config.vocab_size == tokenizer.vocab_size + 22
    assert config.eos_token_ids == (tokenizer.token_id(template.eos_token),)
    assert config.bos_token_id == tokenizer.token_id(template.bos_token)
    with pytest.raises(ModelError, match=f"{TOKENIZER_SIZE} tokens, 64 were asked for"):
        write_tiny_target(tmp_path / "small", vocab_size=64)
    bare = write_tiny_target(tmp_path / "bare", vocab_size=64, tokenizer=False)
    assert not (bare / "tokenizer.json").exists()
    assert len(load_tensors(bare)["model.embed_tokens.weight"]) == 64


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("embedding", [False, True])
def test_heads_fit_their_target(bias: bool, qkv_bias: bool, embedding: bool, tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", hidden_size=48, num_heads=3, num_kv_heads=1, rope_theta=5e5)
    head = write_tiny_head(tmp_path / "head", target, bias=bias, qkv_bias=qkv_bias, embedding=embedding)
    config, tensors = DraftConfig.from_folder(head), load_tensors(head)
    assert (config.fc_bias, config.qkv_bias, config.rope.theta) == (bias, qkv_bias, 5e5)
    assert ("embed_tokens.weight" in tensors) == embedding
    check_head(config, tensors, TargetConfig.from_folder(target), load_tensors(target)["model.embed_tokens.weight"])
