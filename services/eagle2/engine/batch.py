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
        self._num_rows = 0
        self._tokens: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._slots: list[np.ndarray] = []
        self._starts = [0]
        self._tables: list[Slots] = []
        self._lengths: list[np.ndarray] = []
        self._paths: list[np.ndarray] = []

    def __len__(self) -> int:
        return self._num_rows

    def add_span(self, table: Slots, first: int, tokens: Sequence[int]) -> None:
        """Consecutive tokens of a text, at positions first, first + 1, ...; their slots stand in ``table``."""
        count = len(tokens)
        positions = np.arange(first, first + count)
        self._add(tokens, positions, table[positions], positions + 1, np.empty((count, 0), np.int32))
        self._end_sequences([table], [count])

    def add_nodes(self, table: Slots, tokens: Sequence[int], depths: np.ndarray, paths: np.ndarray) -> None:
        """Tree nodes after the committed positions of ``table``.

        depths (N,): edges from the first level behind the context. paths (N, P) int32: slots from that level to the
        node itself, padded with -1.
        """
        self.add_trees([table], [len(depths)], tokens, depths, paths)

    def add_trees(
        self,
        tables: Sequence[Slots],
        sizes: Sequence[int],
        tokens: Sequence[int] | np.ndarray,
        depths: np.ndarray,
        paths: np.ndarray,
    ) -> None:
        """``add_nodes`` for several sequences at once, whose nodes stand one after another: ``sizes`` of each."""
        lengths = np.repeat([len(table) for table in tables], sizes)
        own = paths[np.arange(len(depths)), depths]
        self._add(tokens, lengths + depths, own, lengths, paths)
        self._end_sequences(tables, sizes)

    def build(self, device: torch.device = _HOST) -> Rows:
        width = max((len(table) for table in self._tables), default=0)
        tables = np.zeros((len(self._tables), max(width, 1)), dtype=np.int32)
        for row, table in zip(tables, self._tables, strict=True):
            row[: len(table)] = table
        deepest = max((paths.shape[1] for paths in self._paths), default=0)
        paths = np.full((len(self), max(deepest, 1)), -1, dtype=np.int32)
        begin = 0
        for part in self._paths:
            paths[begin : begin + len(part), : part.shape[1]] = part
            begin += len(part)

        def tensor(array: np.ndarray, dtype: type) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))

        return Rows(
            tokens=tensor(np.concatenate(self._tokens), np.int64),
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
        tokens: Sequence[int] | np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
        paths: np.ndarray,
    ) -> None:
        self._num_rows += len(tokens)
        self._tokens.append(np.asarray(tokens, np.int64))
        self._positions.append(positions)
        self._slots.append(slots)
        self._lengths.append(lengths)
        self._paths.append(paths)

    def _end_sequences(self, tables: Sequence[Slots], sizes: Sequence[int]) -> None:
        self._tables.extend(tables)
        for size in sizes:
            self._starts.append(self._starts[-1] + size)
