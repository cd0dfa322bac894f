"""The EAGLE-1/2 draft head as a trainable module; its parameter names are those of the published checkpoints.

Shapes: B sequences, T rows, H hidden, A query heads, G key/value heads, D head size. Row i of a sequence t0, t1, ...
takes ``fc(concat(embedding(t(i+1)), feature(i)))`` at rotary position i and predicts feature i + 1
(EAGLE, arXiv 2401.15077, section 4.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle2.errors import ConfigError
from eagle2.models.architecture import DraftConfig
from eagle2.models.checkpoint import load_tensors
from eagle2.training.attention import attend_before

KeyValues = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values (B, G, T, D) that each pass over the same rows left: first with true features, then the rollouts."""


class _Attention(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        H, D, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.q_proj = nn.Linear(H, config.num_heads * D, bias=bias)
        self.k_proj = nn.Linear(H, config.num_kv_heads * D, bias=bias)
        self.v_proj = nn.Linear(H, config.num_kv_heads * D, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * D, H, bias=False)
        self.head_dim = D
        self.theta = config.rope.theta

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, H) -> queries (B, A, T, D), keys and values (B, G, T, D), rotated to positions 0..T-1."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = _rotary(x.shape[1], self.head_dim, self.theta, x.device)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def attend(self, q: Tensor, passes: KeyValues) -> Tensor:
        """Attention of the newest of ``passes`` over all of them -> (B, T, H).

        A row at distance d behind a key's row sees it in exactly one pass, as drafting does: the true features of
        everything committed, then one approximate feature per drafted level, its own included.
        """
        k, v = passes[0]
        B, G, T, D = k.shape
        last = len(passes) - 1
        # The heads of a group share their keys: one product with A/G * T rows.
        rows = (q * D**-0.5).reshape(B * G, -1, T, D)
        # Of each later pass a row sees a single key: that of the row ``last - n`` before it.
        later = [[_behind(x, last - n).reshape(B * G, 1, T, D) for x in kv] for n, kv in enumerate(passes) if n > 0]
        own = torch.cat([(rows * k).sum(dim=-1, keepdim=True) for k, _ in later], dim=-1) if later else None
        true, weights = attend_before(rows, k.reshape(B * G, T, D), v.reshape(B * G, T, D), own, distance=last)
        mixed = true.unflatten(1, (-1, T))
        for n, (_, v) in enumerate(later):
            mixed = mixed + weights[..., n : n + 1] * v
        attended: Tensor = self.o_proj(mixed.reshape(B, -1, T, D).transpose(1, 2).flatten(2))
        return attended


def _behind(x: Tensor, distance: int) -> Tensor:
    """x (B, G, T, D) -> row i is what row ``i - distance`` was, zero in the first rows."""
    return F.pad(x[:, :, : x.shape[2] - distance], (0, 0, distance, 0))


class _Mlp(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Norm(nn.Module):
    """RMS norm computed in float32, whatever dtype comes in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class _Layer(nn.Module):
    """A Llama layer without ``input_layernorm``."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)


class DraftHead(nn.Module):
    """``fc`` and one layer, without a final norm; the output goes straight into the target's lm_head."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        assert config.rope.kind == "none", "heads are trained with unscaled rotary positions"
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([_Layer(config)])

    def forward(self, embeddings: Tensor, features: Tensor, earlier: KeyValues = ()) -> tuple[Tensor, KeyValues]:
        """Predict the next feature of every row.

        embeddings: (B, T, H), of the token *after* each row's feature.
        features:   (B, T, H); true ones where ``earlier`` is empty, else what ``shifted`` makes of the last prediction.
        earlier:    what the passes before over the same rows returned.
        Returns predictions (B, T, H) and the passes so far, this one included. Rows behind a padded end are garbage.
        """
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        x = self.fc(torch.cat([embeddings, features], dim=-1))
        q, k, v = layer.self_attn.project(x)
        passes = (*earlier, (k, v))
        x = x + layer.self_attn.attend(q, passes)
        return x + layer.mlp(layer.post_attention_layernorm(x)), passes


def shifted(predicted: Tensor) -> Tensor:
    """Predictions (B, T, H) of a pass as input features of the next one: row i takes what row i - 1 predicted."""
    return F.pad(predicted[:, :-1], (0, 0, 1, 0))


def initialise(head: DraftHead, generator: torch.Generator) -> None:
    """Draw all weights anew: normal with deviation 0.02, norms 1, biases 0."""
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def initialise_from_target(
    head: DraftHead, last_layer: Mapping[str, Tensor], final_norm: Tensor, sample: Tensor
) -> None:
    """Start from the target's last layer, rewritten to read and write *normed* hidden states; ``fc`` lets features by.

    The target's stream x and its feature are related by feature = x / rms(x) * g, with g the final norm's weight. So
    queries, keys and values read features through their own input norm over g, and what attention and MLP add is
    multiplied by g. The factor 1 / rms(x) is not known from features: it is set so that on ``sample`` each of the two
    adds 0.4 times the size of its input, about what last layers do.

    last_layer: tensors by their names within the layer, e.g. ``self_attn.q_proj.weight``.
    final_norm: g (H,).
    sample:     (T, H), true features of some text.
    """
    g = final_norm.float()
    # Near zero in g means that the feature does not carry this direction.
    floor = 0.2 * g.abs().mean()
    g = torch.where(g.abs() < floor, torch.where(g < 0, -floor, floor), g)
    weights = {name: tensor.float() for name, tensor in last_layer.items()}
    layer = head.layers[0]
    assert isinstance(layer, _Layer)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            value = weights[name]
            if name.endswith("weight") and name.startswith(("self_attn.q", "self_attn.k", "self_attn.v")):
                value = value * (weights["input_layernorm.weight"] / g)
            elif name.startswith(("self_attn.o", "mlp.down")):
                value = value * g[:, None]
            elif name == "post_attention_layernorm.weight":
                value = value / g * g.abs().mean()
            parameter.copy_(value)
        head.fc.weight[:, head.config.hidden_size :] += 0.5 * torch.eye(head.config.hidden_size)
        x = sample.float()[None]
        q, k, v = layer.self_attn.project(x)
        attended = layer.self_attn.attend(q, ((k, v),))
        layer.self_attn.o_proj.weight *= 0.4 * x.norm() / attended.norm().clamp(min=1e-6)
        added = layer.mlp(layer.post_attention_layernorm(x))
        layer.mlp.down_proj.weight *= 0.4 * x.norm() / added.norm().clamp(min=1e-6)


def continue_from(head: DraftHead, folder: Path) -> None:
    """Take the weights of the head in ``folder``. Raises ``ConfigError`` where its shape is another one."""
    tensors = {name: t.float() for name, t in load_tensors(folder).items() if name != "embed_tokens.weight"}
    wanted = {name: parameter.shape for name, parameter in head.state_dict().items()}
    for name in sorted(wanted.keys() | tensors.keys()):
        shapes = [tuple(where[name]) if name in where else "absent" for where in (wanted, _shapes(tensors))]
        if shapes[0] != shapes[1]:
            raise ConfigError(f"{folder} is no head to go on from: {name} is {shapes[1]} there, {shapes[0]} here.")
    head.load_state_dict(tensors)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _rotary(length: int, size: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, D) of positions 0..T-1, float32, half-split as in Llama."""
    frequency = theta ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], dim=-1) * sin.to(x.dtype)
