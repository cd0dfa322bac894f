"""Random small checkpoints in the published formats, for tests and demonstrations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle2.errors import ModelError
from eagle2.models.architecture import TargetConfig

BOS, EOS, TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
_SPECIALS = (BOS, TURN, EOS)
_PAIRS = "th|he|in|er|an|re|on|at|en|nd|ti|es|or|te|of|ed|is|it|al|ar|st|to|nt|ng|se|ha|as|ou|io|le"
_MERGES: list[tuple[str, str]] = [(pair[0], pair[1]) for pair in _PAIRS.split("|")] + [("Ġ", "th")]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('The role ' ~ message['role'] ~ ' is unknown.') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The special tokens, 256 bytes, and enough merges for them to matter.
TOKENIZER_SIZE = len(_SPECIALS) + 256 + len(_MERGES)


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of ``TOKENIZER_SIZE`` tokens: ids 0..2 special, 3..258 bytes, then merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIALS, *alphabet, *("".join(pair) for pair in _MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    return tokenizer


def write_tiny_target(
    folder: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    vocab_size: int = TOKENIZER_SIZE,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 2048,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    tie_word_embeddings: bool = False,
    sliding_window: int | None = None,
    tokenizer: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random target and return its folder. Ids from ``TOKENIZER_SIZE`` on are padding.

    The weights are large enough that the next token depends visibly on the context.
    """
    if tokenizer and vocab_size < TOKENIZER_SIZE:
        raise ModelError(f"A tiny target with a tokenizer needs {TOKENIZER_SIZE} tokens, {vocab_size} were asked for.")
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": rope_theta,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "tie_word_embeddings": tie_word_embeddings,
        "sliding_window": sliding_window,
        "bos_token_id": _SPECIALS.index(BOS),
        "eos_token_id": _SPECIALS.index(EOS),
        "dtype": str(dtype).removeprefix("torch."),
    }
    _write_json(folder / "config.json", values)
    _write_json(folder / "generation_config.json", {key: values[key] for key in ("bos_token_id", "eos_token_id")})
    if tokenizer:
        tiny_tokenizer().save(str(folder / "tokenizer.json"))
        _write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            },
        )
    tensors = _target_tensors(TargetConfig.from_folder(folder), torch.Generator().manual_seed(seed))
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_tiny_head(
    folder: Path,
    target_folder: Path,
    *,
    seed: int = 0,
    bias: bool = True,
    qkv_bias: bool = False,
    embedding: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random EAGLE-1/2 head that fits the target in ``target_folder`` and return its folder.

    ``embedding`` adds a copy of the target's, as published heads have it. Random heads are rarely right.
    """
    target = TargetConfig.from_folder(target_folder)
    folder.mkdir(parents=True, exist_ok=True)
    source = json.loads((target_folder / "config.json").read_text())
    copied = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "bos_token_id", "eos_token_id"),
    )
    values = {key: source[key] for key in copied if key in source}
    extra = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "bias": bias}
    _write_json(folder / "config.json", {**values, **extra, "qkv_bias": qkv_bias})
    draw = _Draw(torch.Generator().manual_seed(seed))
    H = target.hidden_size
    tensors = {"fc.weight": draw(H, 2 * H), **_layer_tensors(draw, target, "layers.0.", qkv_bias, False, False, False)}
    if bias:
        tensors["fc.bias"] = draw(H)
    if embedding:
        with safe_open(target_folder / "model.safetensors", framework="pt") as stored:
            tensors["embed_tokens.weight"] = stored.get_tensor("model.embed_tokens.weight")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


class _Draw:
    """Normal random tensors from one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __call__(self, *shape: int, std: float = 0.08, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * std + mean


def _layer_tensors(
    draw: _Draw, config: TargetConfig, prefix: str, qkv_bias: bool, o_bias: bool, mlp_bias: bool, qk_norm: bool
) -> dict[str, torch.Tensor]:
    H, inter = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = (
        ("self_attn.q_proj", q, H, qkv_bias),
        ("self_attn.k_proj", kv, H, qkv_bias),
        ("self_attn.v_proj", kv, H, qkv_bias),
        ("self_attn.o_proj", H, q, o_bias),
        ("mlp.gate_proj", inter, H, mlp_bias),
        ("mlp.up_proj", inter, H, mlp_bias),
        ("mlp.down_proj", H, inter, mlp_bias),
    )
    tensors = {}
    for name, rows, columns, bias in linears:
        tensors[f"{prefix}{name}.weight"] = draw(rows, columns)
        if bias:
            tensors[f"{prefix}{name}.bias"] = draw(rows)
    norms = [("post_attention_layernorm", H)]
    if qk_norm:
        norms += [("self_attn.q_norm", config.head_dim), ("self_attn.k_norm", config.head_dim)]
    for name, size in norms:
        tensors[f"{prefix}{name}.weight"] = draw(size, std=0.1, mean=1.0)
    return tensors


def _target_tensors(config: TargetConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    draw = _Draw(generator)
    V, H = config.vocab_size, config.hidden_size
    tensors = {"model.embed_tokens.weight": draw(V, H, std=0.3), "model.norm.weight": draw(H, std=0.1, mean=1.0)}
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        biases = (config.qkv_bias, config.o_bias, config.mlp_bias)
        tensors |= _layer_tensors(draw, config, prefix, *biases, config.qk_norm)
        tensors[f"{prefix}input_layernorm.weight"] = draw(H, std=0.1, mean=1.0)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = draw(V, H, std=0.3)
    return tensors


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
