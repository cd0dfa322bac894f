"""Assembles the flat batch of one forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eagle2.kv_cache.slots import Slots
from eagle2.models.rows import Rows

_HOST = torch.device("cpu")


class RowsBuilder:
    """Collects the new rows of one sequence after another, then makes ``Rows`` of them."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._positions: list[np.ndarray] = []
        self._slots: list[np.ndarray] = []
        self._starts = [0]
        self._tables: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._paths: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add_span(self, table: Slots, first: int, tokens: Sequence[int]) -> None:
        """Consecutive tokens of a text, at positions first, first + 1, ...; their slots stand in ``table``."""
        positions = np.arange(first, first + len(tokens))
        self._add(tokens, positions, table[positions], table, positions + 1, np.empty((len(tokens), 0), np.int32))

    def add_nodes(self, table: Slots, tokens: Sequence[int], depths: np.ndarray, paths: np.ndarray) -> None:
        """Tree nodes after the committed positions of ``table``.

        depths (N,): edges from the first level behind the context. paths (N, P) int32: slots from that level to the
        node itself, padded with -1.
        """
        own = np.take_along_axis(paths, depths[:, None], axis=1)[:, 0]
        self._add(tokens, len(table) + depths, own, table, np.full(len(depths), len(table)), paths)

    def build(self, device: torch.device = _HOST) -> Rows:
        width = max((len(table) for table in self._tables), default=0)
        tables = np.zeros((len(self._tables), max(width, 1)), dtype=np.int32)
        for row, table in zip(tables, self._tables, strict=True):
            row[: len(table)] = table
        deepest = max((paths.shape[1] for paths in self._paths), default=0)
        paths = np.full((len(self), max(deepest, 1)), -1, dtype=np.int32)
        for begin, part in zip(self._starts, self._paths, strict=False):
            paths[begin : begin + len(part), : part.shape[1]] = part

        def tensor(array: np.ndarray, dtype: type) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))

        return Rows(
            tokens=tensor(np.array(self._tokens), np.int64),
            positions=tensor(np.concatenate(self._positions), np.int64),
            slots=tensor(np.concatenate(self._slots), np.int32),
            starts=tensor(np.array(self._starts), np.int32),
            tables=tensor(tables, np.int32),
            lengths=tensor(np.concatenate(self._lengths), np.int32),
            paths=tensor(paths, np.int32),
            path_lengths=tensor((paths >= 0).sum(axis=1), np.int32),
        ).to(device)

    def _add(
        self,
        tokens: Sequence[int],
        positions: np.ndarray,
        slots: np.ndarray,
        table: Slots,
        lengths: np.ndarray,
        paths: np.ndarray,
    ) -> None:
        self._tokens.extend(tokens)
        self._positions.append(positions)
        self._slots.append(slots)
        self._starts.append(len(self._tokens))
        self._tables.append(table)
        self._lengths.append(lengths)
        self._paths.append(paths)
