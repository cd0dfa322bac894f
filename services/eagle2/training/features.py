"""The target's features of all examples, computed once and kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle2.errors import ConfigError
from eagle2.training.batches import packed
from eagle2.training.data import Example

Features = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Token ids (T,) int64 of some texts -> the target's hidden states after its final norm (T, H) of each."""

# Tokens of one forward pass, padding counted: enough for products at full speed, few enough for a CPU's caches.
_BATCH_TOKENS = 2048
# Tokens between two writes. Within them texts are sorted by length; a kill loses at most these.
_WINDOW_TOKENS = 32_768
_VALUES, _INDEX, _META = "features.bin", "features.index", "features.json"
_ITEM = 2  # bytes of a bfloat16


class FeatureStore:
    """Features of a list of examples, bfloat16, one after the other in one file.

    ``features.bin`` holds the values, ``features.index`` the first row of each finished example (int64, and one more
    for the end), ``features.json`` what they were computed from. Values reach the disk before the index names them, so
    a killed computation goes on where it was.
    """

    def __init__(self, folder: Path, examples: Sequence[Example], hidden_size: int, source: str) -> None:
        """Open or begin a store. ``source`` names the target's weights, so that another target's are not taken.

        Raises ``ConfigError`` where ``folder`` holds features of other examples or of another target.
        """
        self.folder = folder
        self.hidden_size = hidden_size
        self._examples = examples
        folder.mkdir(parents=True, exist_ok=True)
        meta = {"source": source, "hidden_size": hidden_size, "examples": _digest(examples)}
        path = folder / _META
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            wrong = [key for key in meta if found.get(key) != meta[key]]
            if wrong:
                raise ConfigError(
                    f"{folder} holds features made from another {wrong[0]} ({found.get(wrong[0])!r}, now "
                    f"{meta[wrong[0]]!r}); remove the folder or name another one."
                )
        else:
            path.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        index = folder / _INDEX
        stored = index.read_bytes() if index.is_file() else b""
        # A kill may leave half a number at the end.
        offsets = np.frombuffer(stored[: len(stored) // 8 * 8], dtype=np.int64)
        self._offsets: list[int] = [0, *(int(offset) for offset in offsets)]
        values = folder / _VALUES
        size = values.stat().st_size if values.is_file() else 0
        while self._offsets[-1] * hidden_size * _ITEM > size:
            self._offsets.pop()

    @property
    def num_done(self) -> int:
        """How many examples, from the first on, have their features."""
        return len(self._offsets) - 1

    def compute(self, features: Features, progress: Callable[[int, int], None] | None = None) -> None:
        """Compute what is missing; ``progress`` hears (tokens done, tokens in all) after every write."""
        total = sum(len(example) for example in self._examples)
        with (self.folder / _VALUES).open("ab") as values, (self.folder / _INDEX).open("ab") as index:
            values.truncate(self._offsets[-1] * self.hidden_size * _ITEM)
            index.truncate(self.num_done * 8)
            for window in self._windows():
                computed = self._compute(features, window)
                for i in window:
                    rows = computed[i]
                    assert rows.shape == (len(self._examples[i]), self.hidden_size), f"features {tuple(rows.shape)}"
                    bits = rows.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
                    values.write(bits.numpy().tobytes())
                    self._offsets.append(self._offsets[-1] + len(rows))
                    index.write(np.int64(self._offsets[-1]).tobytes())
                _flush(values.fileno(), values.flush)
                _flush(index.fileno(), index.flush)
                if progress is not None:
                    progress(self._offsets[-1], total)

    def _windows(self) -> Iterator[list[int]]:
        """Examples that have no features yet, in order, in runs of about ``_WINDOW_TOKENS``."""
        window: list[int] = []
        tokens = 0
        for i in range(self.num_done, len(self._examples)):
            window.append(i)
            tokens += len(self._examples[i])
            if tokens >= _WINDOW_TOKENS:
                yield window
                window, tokens = [], 0
        if window:
            yield window

    def _compute(self, features: Features, window: Sequence[int]) -> dict[int, Tensor]:
        """Features by example: texts of about one length together, as many as ``_BATCH_TOKENS`` hold."""
        lengths = [len(example) for example in self._examples]
        computed: dict[int, Tensor] = {}
        for batch in packed(lengths, sorted(window, key=lengths.__getitem__), _BATCH_TOKENS):
            texts = [torch.from_numpy(self._examples[i].ids.astype(np.int64)) for i in batch]
            computed |= dict(zip(batch, features(texts), strict=True))
        return computed

    def __getitem__(self, i: int) -> Tensor:
        """Features (T, H) bfloat16 of example ``i``, which must be done."""
        start, stop = self._offsets[i], self._offsets[i + 1]
        with (self.folder / _VALUES).open("rb") as values:
            values.seek(start * self.hidden_size * _ITEM)
            bits = np.fromfile(values, dtype=np.int16, count=(stop - start) * self.hidden_size)
        return torch.from_numpy(bits).view(torch.bfloat16).view(stop - start, self.hidden_size)


def _flush(descriptor: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(descriptor)


def _digest(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example).to_bytes(8, "little"))
        digest.update(example.ids.tobytes())
    return digest.hexdigest()[:16]
