"""The loss of the EAGLE-1/2 head: regression of the feature and distillation of the next-token distribution.

Shapes: N rows, H hidden, V vocabulary (or the subset that is scored).
"""

from __future__ import annotations

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
    """Sum over rows of H(softmax(lm_head(truth)), softmax(lm_head(predicted))), gradient made on the way forward.

    Keeping (N, V) probabilities for the backward pass would cost more time in memory traffic than the products do.
    """

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, truth: Tensor, scorer: Scorer) -> Tensor:
        dtype = scorer.rows.dtype
        predicted_cast, truth_cast = predicted.to(dtype), truth.to(dtype)
        gradient = torch.empty_like(predicted_cast)
        total = torch.zeros((), dtype=torch.float32, device=predicted.device)
        for start in range(0, len(predicted), _CHUNK):
            rows = slice(start, start + _CHUNK)
            n = len(predicted_cast[rows])
            logits, truth_logits = (_product(values[rows], scorer.rows) for values in (predicted_cast, truth_cast))
            wanted, likely = torch.softmax(truth_logits, dim=-1), torch.softmax(logits, dim=-1)
            # log(sum(exp(logits))) from the largest term: a second look at all of them would cost as much as a product.
            best, share = logits.amax(dim=-1).float(), likely.amax(dim=-1).float()
            entropies = best - share.log() - torch.linalg.vecdot(wanted, logits).float()
            total += entropies[:n].sum()
            gradient[rows] = F.linear(likely.sub_(wanted), scorer.columns)[:n]
        ctx.save_for_backward(gradient.to(predicted.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer, None, None


def _product(values: Tensor, weight: Tensor) -> Tensor:
    """``values`` (n, H) @ ``weight`` (V, H)^T, with zero rows added up to a multiple of 32."""
    return F.linear(F.pad(values, (0, 0, 0, -len(values) % _STEP)), weight)


@dataclass(frozen=True, slots=True)
class Loss:
    """Means over the rows. ``total`` carries the gradient; the parts are for the log."""

    total: Tensor
    regression: float
    cross_entropy: float


def distillation_loss(
    predicted: Tensor,
    truth: Tensor,
    scorer: Scorer,
    *,
    regression_weight: float = 1.0,
    cross_entropy_weight: float = 0.1,
) -> Loss:
    """SmoothL1(predicted, truth) + soft cross-entropy of the two next-token distributions, weighted (EAGLE, 3.2).

    predicted, truth: (N, H) features, only of rows that count, N at least 1.
    """
    regression = F.smooth_l1_loss(predicted.float(), truth.float())
    summed: Tensor = _SoftCrossEntropy.apply(predicted, truth, scorer)  # type: ignore[no-untyped-call]
    cross_entropy = summed / len(predicted)
    total = regression_weight * regression + cross_entropy_weight * cross_entropy
    return Loss(total, float(regression.detach()), float(cross_entropy.detach()))
