"""Attention of training: keys of one long pass, and single keys of later ones, in one softmax.

Written out, with its own gradient: backwards, the fused operator takes four times as long on a CPU, and it would look
at whole passes for the sake of one key each.

Shapes: N sequences x key heads, R query heads a key head, T rows, D head size, L later passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Finite, so that a row that sees none of the keys gets garbage and no NaN.
_HIDDEN = -30_000.0


def attend_before(
    rows: Tensor, keys: Tensor, values: Tensor, own: Tensor | None, distance: int
) -> tuple[Tensor, Tensor]:
    """Row i sees the keys of rows up to ``i - distance``, and those whose scores stand in ``own``.

    rows (N, R, T, D), scaled; keys, values (N, T, D); own (N, R, T, L), the scores of L further keys, or None.
    Returns what the seen values add up to (N, R * T, D), and the weights (N, R, T, L) of the further keys. The first
    ``distance`` rows are garbage.
    """
    N, R, T, D = rows.shape
    if own is None:
        own = rows.new_zeros(N, R, T, 0)
    mixed, weights = _Attend.apply(rows.reshape(N, R * T, D), keys, values, own.flatten(1, 2), distance)  # type: ignore[no-untyped-call]
    return mixed, weights.unflatten(1, (R, T))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, keys: Tensor, values: Tensor, own: Tensor, distance: int
    ) -> tuple[Tensor, Tensor]:
        T = keys.shape[1]
        row = torch.arange(T, device=keys.device)
        hidden = torch.where(row[:, None] - row < distance, _HIDDEN, 0.0).to(rows.dtype)
        scores = torch.baddbmm(hidden.repeat(rows.shape[1] // T, 1), rows, keys.transpose(1, 2))
        shares = torch.softmax(scores, dim=-1)
        if own.shape[-1]:
            # log(sum(exp(scores))) from the largest term, without a second look at all of them.
            total = scores.amax(-1, keepdim=True).float() - shares.amax(-1, keepdim=True).float().log()
            everything = torch.logsumexp(torch.cat([total, own.float()], dim=-1), dim=-1, keepdim=True)
            shares = shares.mul_((total - everything).exp().to(shares.dtype))
            weights = (own.float() - everything).exp().to(own.dtype)
        else:
            weights = torch.zeros_like(own)
        mixed = shares @ values
        ctx.save_for_backward(rows, keys, values, shares, weights, mixed)
        return mixed, weights

    @staticmethod
    def backward(ctx: Any, d_mixed: Tensor, d_weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        rows, keys, values, shares, weights, mixed = ctx.saved_tensors
        mean = (d_mixed * mixed).sum(-1, keepdim=True) + (d_weights * weights).sum(-1, keepdim=True)
        d_scores = (d_mixed @ values.transpose(1, 2)).sub_(mean).mul_(shares)
        return (
            d_scores @ keys,
            d_scores.transpose(1, 2) @ rows,
            shares.transpose(1, 2) @ d_mixed,
            weights * (d_weights - mean),
            None,
        )
