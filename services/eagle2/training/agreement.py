"""How often a head agrees with the recorded text, step by step: a cheap stand-in for tau without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle2.training.batches import Batch
from eagle2.training.head import DraftHead, KeyValues, shifted

# Logits of this many rows exist at once: 512 x 128 k tokens in float32 are 256 MB.
_ROWS = 512


@dataclass(frozen=True, slots=True)
class Agreement:
    """Means over all answer rows of held-out text.

    regression: SmoothL1 of the first predicted feature.
    top1, topk: per step, how often the token that really came next was the best, or among the k best, given that the
                whole draft before it was right.
    k:          how many "among the k best" means.
    """

    regression: float
    top1: tuple[float, ...]
    topk: tuple[float, ...]
    k: int

    @property
    def chain_tau(self) -> float:
        """Tokens per cycle that a chain as deep as there are steps would commit, the bonus counted."""
        tau, reached = 1.0, 1.0
        for rate in self.top1:
            reached *= rate
            tau += reached
        return tau

    def __str__(self) -> str:
        first, best = (" ".join(f"{rate:.3f}" for rate in rates) for rates in (self.top1, self.topk))
        return f"regression {self.regression:.4f}, top-1 {first}, top-{self.k} {best}, chain tau {self.chain_tau:.3f}"


@torch.inference_mode()
def measure_agreement(
    head: DraftHead, batches: Iterable[Batch], embedding: Tensor, lm_head: Tensor, *, steps: int = 3, k: int = 10
) -> Agreement:
    """Draft ``steps`` tokens after every answer row of ``batches``, feeding predictions back as drafting does.

    embedding, lm_head: (V, H), the target's.
    """
    hits, near, tried = torch.zeros(steps), torch.zeros(steps), torch.zeros(steps)
    error, rows = 0.0, 0
    for batch in batches:
        embedded = embedding[batch.next_ids].float()
        wanted = F.pad(batch.next_ids[:, 1:], (0, 1))
        # The last row of an example predicts a feature whose next token was not recorded.
        last = torch.arange(batch.next_ids.shape[1]) == batch.lengths[:, None] - 1
        counted = batch.answer & ~last
        alive = counted
        inputs = batch.features
        passes: KeyValues = ()
        for step in range(steps):
            predicted, passes = head(embedded, inputs.to(embedded.dtype), passes)
            if step == 0:
                losses = F.smooth_l1_loss(predicted.float(), batch.targets.float(), reduction="none").mean(-1)
                error, rows = error + float(losses[counted].sum()), rows + int(counted.sum())
            at = alive.nonzero()
            right = torch.zeros_like(alive)
            for chunk in at.split(_ROWS):
                where = (chunk[:, 0], chunk[:, 1])
                best = F.linear(predicted[where].to(lm_head.dtype), lm_head).topk(k, dim=-1).indices
                found = best == wanted[where][:, None]
                right[where] = found[:, 0]
                hits[step] += found[:, 0].sum()
                near[step] += found.any(dim=-1).sum()
            tried[step] += len(at)
            # Row i was right: its draft goes on at row i + 1.
            alive = F.pad(right[:, :-1], (1, 0)) & counted
            inputs = shifted(predicted)
    tried = tried.clamp(min=1)
    return Agreement(error / max(rows, 1), tuple((hits / tried).tolist()), tuple((near / tried).tolist()), k)
