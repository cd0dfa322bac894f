"""``transformers`` generate on the same weights: what everybody can run without eagle2."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from eagle2.errors import ConfigError
from eagle2.evaluation.measure import Generation


class TransformersBaseline:
    """Greedy ``generate`` with its defaults otherwise: SDPA attention, a dynamic cache, no compilation."""

    def __init__(self, folder: Path, dtype: str, device: torch.device, eos_token_ids: Sequence[int]) -> None:
        """Load the checkpoint in ``folder``. Raises ``ConfigError`` where transformers is not installed."""
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError:
            raise ConfigError(
                "The comparison needs the package transformers, which is not installed; "
                "install it, or leave the comparison out with --no-baseline."
            ) from None
        # Some of its functions are not typed, and its wrapped methods are typed as if they were functions.
        cast(Any, logging).disable_progress_bar()
        model = cast(Any, AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)))
        self._model = model.to(device).eval()
        self._device, self._eos = device, list(eos_token_ids)

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> Generation:
        """Answer one prompt in the calling thread, with the number of threads that is set there."""
        prompt = torch.tensor([list(prompt_ids)], device=self._device)
        times = _TokenTimes()
        began = time.perf_counter()
        output = self._model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self._eos,
            pad_token_id=self._eos[0] if self._eos else 0,
            streamer=times,
        )
        ids = tuple(output[0, prompt.shape[1] :].tolist())
        return Generation(ids, times.first - began, times.last - began)

    @torch.inference_mode()
    def gap(self, ids: Sequence[int], a: int, b: int) -> float:
        """How far apart the logits of two tokens lie behind ``ids``: small where rounding decides between them."""
        logits = self._model(torch.tensor([list(ids)], device=self._device)).logits[0, -1].float()
        return abs(float(logits[a] - logits[b]))


class _TokenTimes:
    """A streamer that only looks at the clock: it is given the prompt, then every token as it is chosen."""

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self._count = 0

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002 - the protocol of a streamer
        self._count += 1
        if self._count > 1:
            self.last = time.perf_counter()
            self.first = self.first or self.last

    def end(self) -> None:
        pass
