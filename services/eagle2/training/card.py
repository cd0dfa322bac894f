"""The model card that a trained head is written with."""

from __future__ import annotations

from dataclasses import dataclass

from eagle2.training.held_out import Quality
from eagle2.training.trainer import Recipe


@dataclass(frozen=True, slots=True)
class Training:
    """What happened: enough to judge the head and to do it again."""

    target: str
    data: str
    examples: int
    answer_tokens: int
    held_out: int
    steps: int
    recipe: Recipe
    scored_tokens: int
    vocab_size: int


_OPTIMIZERS = {"muon": "Muon for matrices, AdamW (0.9, 0.95) for vectors", "adamw": "AdamW (0.9, 0.95)"}


def model_card(training: Training, quality: Quality) -> str:
    """README.md of a head (Markdown with the front matter that model hubs read)."""
    recipe, agreement = training.recipe, quality.agreement
    scored = (
        "the whole vocabulary"
        if training.scored_tokens == training.vocab_size
        else f"the {training.scored_tokens} most frequent of {training.vocab_size} tokens"
    )
    steps = "\n".join(
        f"| {n} | {one:.3f} | {many:.3f} |"
        for n, (one, many) in enumerate(zip(agreement.top1, agreement.topk, strict=True), start=1)
    )
    return f"""---
library_name: eagle2
tags: [speculative-decoding, eagle-2, draft-head]
---

# EAGLE-2 draft head for {training.target}

One Llama layer behind `fc` (EAGLE-1/2 checkpoint format). It drafts for the target named above and for no other, and
carries neither an embedding nor an lm_head: both are the target's.

## Training

- Data: {training.data}, {training.examples} conversations with {training.answer_tokens} answer tokens;
  {training.held_out} more were held out.
- {training.steps} steps ({_length(recipe)}), at most {recipe.batch_tokens} tokens a step.
- {_OPTIMIZERS[recipe.optimizer]}, peak learning rate {recipe.learning_rate:g}, warm-up, then {recipe.schedule};
  gradient norm clipped at {recipe.gradient_clip:g}.
- Loss: {recipe.regression_weight:g} x SmoothL1 of the feature + {recipe.cross_entropy_weight:g} x soft
  cross-entropy over {scored}, on answer tokens only;
  uniform noise of width {recipe.noise:g} x 512 / length on input features.
- Up to {recipe.rollout} passes over each batch, more than one from {recipe.rollout_from:.0%} of the run on; all but the
  first take the head's own predictions as input.

## Held-out agreement

How often the token that the target wrote was the head's best, or among its {agreement.k} best, given that the draft
before it was right. A chain of this depth would commit {agreement.chain_tau:.2f} tokens a cycle, the target's own
included.

| draft step | best | among the {agreement.k} best |
|---|---|---|
{steps}

{_tau(quality)}
"""


def _length(recipe: Recipe) -> str:
    return f"at most {recipe.epochs} epochs" + ("" if recipe.hours is None else f" or {recipe.hours:g} hours")


def _tau(quality: Quality) -> str:
    if quality.tau is None:
        return "The tree of a server accepts more than a chain: measure it on the questions that matter to you."
    return f"The engine committed {quality.tau:.2f} tokens a cycle on held-out prompts (greedy, tree 60/6/10)."
