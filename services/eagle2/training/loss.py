"""The loss of the EAGLE-1/2 head: regression of the feature and distillation of the next-token distribution.

Shapes: P passes over a batch, N rows, H hidden, V vocabulary (or the subset that is scored).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows scored at once: logits of a chunk stay in a CPU's cache, and memory does not grow with the batch.
_CHUNK = 256
# The last chunk is padded to a multiple of this, for oneDNN keeps a compiled product for every number of rows.
_STEP = 32


@dataclass(frozen=True, slots=True)
class Scorer:
    """The target's lm_head, whole or for its most frequent tokens, laid out for products in both directions.

    rows:    (V, H).
    columns: (H, V), a contiguous copy: the gradient's product is a third faster with it.
    """

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, lm_head: Tensor, ids: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Scorer:
        """Take ``lm_head`` (V, H), or only the rows ``ids`` of it. Softmaxes then run over these tokens alone."""
        rows = (lm_head if ids is None else lm_head[ids]).to(dtype).contiguous()
        return cls(rows, rows.t().contiguous())


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean over counted rows of H(softmax(lm_head(truth)), softmax(lm_head(predicted))) for each pass -> (P,).

    The gradient is made on the way forward: keeping (N, V) probabilities for the backward pass would cost more time in
    memory traffic than the products do. The truth's probabilities are made once for all passes.
    """

    @staticmethod
    def forward(ctx: Any, truth: Tensor, counted: Tensor, scorer: Scorer, *predicted: Tensor) -> Tensor:
        dtype = scorer.rows.dtype
        truth_cast, casts = truth.to(dtype), [values.to(dtype) for values in predicted]
        gradients = [torch.zeros_like(values) for values in casts]
        totals = torch.zeros(len(predicted), dtype=torch.float32, device=truth.device)
        counts = counted.sum(dim=1).clamp(min=1)
        for start in range(0, len(truth), _CHUNK):
            rows = slice(start, start + _CHUNK)
            n = len(truth_cast[rows])
            wanted = torch.softmax(_product(truth_cast[rows], scorer.rows), dim=-1)
            for place, values in enumerate(casts):
                weights = counted[place, rows].float()
                logits = _product(values[rows], scorer.rows)
                likely = torch.softmax(logits, dim=-1)
                # log(sum(exp(logits))) from the largest term: a second look at all of them would cost as much as a
                # product.
                best, share = logits.amax(dim=-1).float(), likely.amax(dim=-1).float()
                entropies = best - share.log() - torch.linalg.vecdot(wanted, logits).float()
                totals[place] += (entropies[:n] * weights).sum()
                pull = F.linear(likely.sub_(wanted), scorer.columns)[:n]
                gradients[place][rows] = pull * (weights / counts[place])[:, None].to(dtype)
        ctx.save_for_backward(*(g.to(values.dtype) for g, values in zip(gradients, predicted, strict=True)))
        return totals / counts

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (gradient * outer[place] for place, gradient in enumerate(ctx.saved_tensors))
        return None, None, None, *gradients


def _product(values: Tensor, weight: Tensor) -> Tensor:
    """``values`` (n, H) @ ``weight`` (V, H)^T, with zero rows added up to a multiple of 32."""
    return F.linear(F.pad(values, (0, 0, 0, -len(values) % _STEP)), weight)


@dataclass(frozen=True, slots=True)
class Loss:
    """``total`` carries the gradient; the parts, means over the rows of each pass, are for the log."""

    total: Tensor
    regression: tuple[float, ...]
    cross_entropy: tuple[float, ...]


def distillation_loss(
    predicted: Sequence[Tensor],
    truth: Tensor,
    scorer: Scorer,
    counted: Tensor | None = None,
    *,
    regression_weight: float = 1.0,
    cross_entropy_weight: float = 0.1,
) -> Loss:
    """SmoothL1(predicted, truth) + soft cross-entropy of the two next-token distributions, weighted (EAGLE, 3.2).

    predicted: of each of P passes, (N, H) features. truth: (N, H), the same for all of them.
    counted:   (P, N) bool, the rows that count in each pass; None: all. The losses of the passes are added up.
    """
    if counted is None:
        counted = torch.ones(len(predicted), len(truth), dtype=torch.bool, device=truth.device)
    regression = torch.stack(
        [
            (F.smooth_l1_loss(values.float(), truth.float(), reduction="none").mean(dim=-1) * rows).sum() / rows.sum()
            for values, rows in zip(predicted, counted.float(), strict=True)
        ]
    )
    cross_entropy: Tensor = _SoftCrossEntropy.apply(truth, counted, scorer, *predicted)  # type: ignore[no-untyped-call]
    total = (regression_weight * regression + cross_entropy_weight * cross_entropy).sum()
    return Loss(total, tuple(regression.tolist()), tuple(cross_entropy.tolist()))
