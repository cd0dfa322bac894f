"""What training needs of a target: its two embeddings, its features of a text, and its last layer to start from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eagle2.errors import ConfigError
from eagle2.models.architecture import TargetConfig
from eagle2.models.checkpoint import load_tensors
from eagle2.models.rows import Rows
from eagle2.models.target import TargetModel


class FrozenTarget:
    """A target that is only read.

    config:     its shape.
    embedding:  (V, H) in ``dtype``.
    lm_head:    (V, H) in ``dtype``; the embedding itself where the two are tied.
    max_length: tokens of the longest text that ``features`` takes.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, max_length: int) -> None:
        """Raises ``ModelError`` for a checkpoint that is not supported, ``ConfigError`` for a length that it lacks."""
        self.folder = folder
        self.config = TargetConfig.from_folder(folder)
        limit = min(self.config.max_position_embeddings, self.config.sliding_window or max_length)
        if max_length > limit:
            raise ConfigError(f"Examples of {max_length} tokens do not fit the target's context of {limit} tokens.")
        self.max_length = max_length
        self._tensors = load_tensors(folder)
        self._model = TargetModel(self.config, self._tensors, dtype=dtype, max_positions=max_length)
        self._pool = self._model.new_pool(max_length)
        self.embedding = self._model.embedding
        self.lm_head = self._model.head_weight

    @property
    def last_layer(self) -> Mapping[str, Tensor]:
        """Tensors of the last decoder layer by their names within it."""
        prefix = f"model.layers.{self.config.num_layers - 1}."
        return {name.removeprefix(prefix): t for name, t in self._tensors.items() if name.startswith(prefix)}

    @property
    def final_norm(self) -> Tensor:
        """Weight (H,) of the norm that makes features."""
        return self._tensors["model.norm.weight"]

    @property
    def source(self) -> str:
        """A short text that another target's weights would not give."""
        probe = self._tensors["model.embed_tokens.weight"][:: max(1, self.config.vocab_size // 64)].double()
        return f"{self.config.architecture} {self.config.num_layers}x{self.config.hidden_size} {probe.sum():.9g}"

    def features(self, ids: Tensor) -> Tensor:
        """Token ids (T,) int64 of one text, T at most ``max_length`` -> features (T, H)."""
        T = len(ids)
        assert 0 < T <= self.max_length
        places = torch.arange(T, dtype=torch.int32)
        rows = Rows(
            tokens=ids,
            positions=places.long(),
            slots=places,
            starts=torch.tensor([0, T], dtype=torch.int32),
            tables=places[None],
            lengths=places + 1,
            paths=torch.zeros(T, 1, dtype=torch.int32),
            path_lengths=torch.zeros(T, dtype=torch.int32),
        )
        return self._model.forward(rows, self._pool)
