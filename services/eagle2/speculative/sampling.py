"""How the target picks a token: logits processors, and noise that depends on nothing but (seed, position, token).

A request's token at a position is a function of its context, seed and position alone. That is why speculation on or
off, alone or in a batch, this replica or another one give the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
# Below it logits divided by the temperature leave float32; the arg-max wins here already.
_COLDEST = 1e-30


@dataclass(frozen=True, slots=True)
class TokenRule:
    """One request's way of picking, in the order of Hugging Face: penalties and bias, temperature, top_k, top_p, min_p.

    temperature 0 is the arg-max. top_k 0, top_p 1, min_p 0 are off. ``presence`` and ``frequency`` count output
    tokens, ``repetition`` looks at prompt and output.
    """

    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_plain_greedy(self) -> bool:
        """True when the choice is the arg-max of the raw logits, so that nothing else is needed."""
        return self.temperature == 0 and not self.needs_counts and not self.bias

    @property
    def needs_counts(self) -> bool:
        return self.presence != 0 or self.frequency != 0 or self.repetition != 1


@dataclass(slots=True)
class TokenCounts:
    """What the penalties look at, kept up to date with a sequence's committed tokens.

    output: (V,) float32 counts of output tokens; seen: (V,) bool, prompt or output.
    """

    output: Tensor
    seen: Tensor

    @staticmethod
    def of_prompt(prompt: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> TokenCounts:
        seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if prompt:
            seen[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        return TokenCounts(torch.zeros(vocab_size, device=device), seen)

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.output[token] += 1
            self.seen[token] = True

    def with_path(self, tokens: Sequence[int]) -> TokenCounts:
        """The counts at a tree node: the committed ones and those of the node's own path, nothing of its siblings."""
        if not tokens:
            return self
        path = TokenCounts(self.output.clone(), self.seen.clone())
        path.add(tokens)
        return path


def penalised(logits: Tensor, rule: TokenRule, counts: TokenCounts | None) -> Tensor:
    """Repetition, frequency and presence penalties, then bias. logits: (V,) float32; returns a new (V,)."""
    if rule.needs_counts:
        assert counts is not None, "penalties need counts"
        if rule.repetition != 1:
            moved = torch.where(logits > 0, logits / rule.repetition, logits * rule.repetition)
            logits = torch.where(counts.seen, moved, logits)
        logits = logits - rule.frequency * counts.output - rule.presence * (counts.output > 0)
    if rule.bias:
        ids = torch.tensor(list(rule.bias), dtype=torch.int64, device=logits.device)
        values = torch.tensor(list(rule.bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(0, ids, values)
    return logits


def truncated(logits: Tensor, rule: TokenRule) -> Tensor:
    """Temperature, top_k, top_p, min_p: tokens that cannot be drawn become -inf. logits: (V,) float32.

    At least the likeliest token always stays. Ties at the border of top_k all stay.
    """
    logits = logits / max(rule.temperature, _COLDEST)
    if 0 < rule.top_k < logits.shape[-1]:
        border = logits.topk(rule.top_k).values[-1]
        logits = logits.masked_fill(logits < border, -torch.inf)
    if rule.top_p < 1:
        # As in Hugging Face: drop, from the unlikely end, what together holds at most 1 - top_p.
        ascending, order = logits.sort(stable=True)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - rule.top_p
        drop[-1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(0, order, drop), -torch.inf)
    if rule.min_p > 0:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < rule.min_p * probabilities.max(), -torch.inf)
    return logits


def choose_token(logits: Tensor, rule: TokenRule, position: int, counts: TokenCounts | None = None) -> int:
    """The target's token for the absolute ``position``, from its raw logits (V,) float32 there."""
    logits = penalised(logits, rule, counts)
    if rule.temperature == 0:
        return int(logits.argmax())
    logits = truncated(logits, rule)
    return int((logits.double() + gumbel_noise(rule.seed, position, logits.shape[-1], logits.device)).argmax())


def probabilities(logits: Tensor, rule: TokenRule, counts: TokenCounts | None = None) -> Tensor:
    """The distribution that ``choose_token`` draws from (over all seeds), (V,) float32. Temperature above 0."""
    return truncated(penalised(logits, rule, counts), rule).softmax(-1)


def gumbel_noise(seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise (V,) float64, a pure function of (seed, position, token id).

    A 64-bit hash of the three (murmur3's finaliser between the parts) gives a uniform number in (0, 1); integers
    wrap alike on every device. arg-max of (log p + noise) is a draw from p (the Gumbel-max trick).
    """
    key = _mix_int((_mix_int(seed & _MASK64) + position) & _MASK64)
    token = torch.arange(vocab_size, dtype=torch.int64, device=device)
    bits = _mix(token + _signed(key))
    # 52 bits and a half are exact in float64; a 53rd would round up to 1, whose noise is infinite.
    uniform = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


_MULTIPLIERS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)


def _mix_int(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64  # so that 0 does not stay 0
    for multiplier in _MULTIPLIERS:
        value = ((value ^ (value >> 33)) * multiplier) & _MASK64
    return value ^ (value >> 33)


def _mix(value: Tensor) -> Tensor:
    value = value + _signed(0x9E3779B97F4A7C15)
    for multiplier in _MULTIPLIERS:
        value = (value ^ _shift_right(value, 33)) * _signed(multiplier)
    return value ^ _shift_right(value, 33)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """A logical shift; torch's own on int64 drags the sign along."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
