"""What training needs of a target: its two embeddings, its features of a text, and its last layer to start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from eagle2.errors import ConfigError
from eagle2.models.architecture import TargetConfig


class FrozenTarget:
    """A target that is only read.

    The forward pass is that of ``transformers``: batched and on any device. Features differ from those of the serving
    engine by rounding alone, which is far less than the noise that training adds.

    config:     its shape.
    embedding:  (V, H) in ``dtype``.
    lm_head:    (V, H) in ``dtype``; the embedding itself where the two are tied.
    max_length: tokens of the longest text that ``features`` takes.
    device:     where its weights and the results are.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, max_length: int, device: torch.device | str = "cpu") -> None:
        """Raises ``ModelError`` for a checkpoint that is not supported, ``ConfigError`` for a length that it lacks."""
        self.config = TargetConfig.from_folder(folder)
        limit = min(self.config.max_position_embeddings, self.config.sliding_window or max_length)
        if max_length > limit:
            raise ConfigError(f"Examples of {max_length} tokens do not fit the target's context of {limit} tokens.")
        self.max_length = max_length
        self.device = torch.device(device)
        try:
            # Imported late: an installation that only serves has no need of it.
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise ConfigError(f"Training needs transformers ({error}); install eagle2[train].") from None
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        module: nn.Module = model
        module.to(self.device).eval().requires_grad_(False)
        self._decoder: nn.Module = model.model
        self.embedding: Tensor = module.get_parameter("model.embed_tokens.weight").data
        self.lm_head: Tensor = module.get_parameter("lm_head.weight").data

    @property
    def last_layer(self) -> Mapping[str, Tensor]:
        """Tensors of the last decoder layer by their names within it."""
        prefix = f"layers.{self.config.num_layers - 1}."
        tensors = self._decoder.state_dict()
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    @property
    def final_norm(self) -> Tensor:
        """Weight (H,) of the norm that makes features."""
        weight: Tensor = self._decoder.state_dict()["norm.weight"]
        return weight

    @property
    def source(self) -> str:
        """A short text that another target's weights would not give."""
        probe = self.embedding[:: max(1, self.config.vocab_size // 64)].double()
        return f"{self.config.architecture} {self.config.num_layers}x{self.config.hidden_size} {probe.sum():.9g}"

    @torch.inference_mode()
    def features(self, texts: Sequence[Tensor]) -> list[Tensor]:
        """Token ids (T,) int64 of each text, T from 1 to ``max_length`` -> features (T, H) of each, on ``device``."""
        lengths = [len(text) for text in texts]
        assert all(0 < length <= self.max_length for length in lengths)
        # Padding stands behind the text, where a causal mask hides it from every row that is kept.
        ids = nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(self.device)
        rows: Tensor = self._decoder(ids, use_cache=False).last_hidden_state
        return [rows[i, :length] for i, length in enumerate(lengths)]
