"""The head rows that a proposer holds: of sequences that run, and of texts that may come again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eagle2.kv_cache.prefix import PrefixIndex, Tokens
from eagle2.kv_cache.slots import SlotPool, Slots, SlotTable
from eagle2.transport.messages import Opening


@dataclass(slots=True)
class _Held:
    """One sequence's rows. ``root`` names its tenant and first token, ``text`` are the tokens behind that one, as many
    as there are rows; both are unknown of a sequence that was not opened, and nothing of it is shared."""

    table: SlotTable
    root: str | None = None
    text: list[int] = field(default_factory=list)
    has_tree: bool = False


class HeadRows:
    """Rows by sequence over one pool, and an index of them by tenant and tokens; without ``enabled`` no index.

    Row i is made of the features at positions 0..i and the tokens at 1..i+1, so of the tokens at 0..i+1 and of nothing
    else: the target's features are the same bits whenever they are computed. The index therefore knows row i by the
    tenant and the token at position 0 together, its root, and by those at 1..i+1, the text below it.
    """

    def __init__(self, pool: SlotPool, *, enabled: bool = True) -> None:
        self._pool = pool
        self._index = PrefixIndex(pool) if enabled else None
        self._held: dict[int, _Held] = {}

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._held

    def num_held(self, sequence: int) -> int:
        held = self._held.get(sequence)
        return 0 if held is None else len(held.table)

    def open(self, sequence: int, opening: Opening) -> int:
        """Begin a sequence with what is known of its text; returns how many rows that is.

        One that is open already is begun anew. Its rows are not lost by that: they are a part of what is known.
        """
        self.close(sequence)
        held = self._held[sequence] = _Held(SlotTable(self._pool))
        if self._index is not None and len(opening.tokens):
            first, *text = opening.tokens.tolist()
            held.root = f"{opening.tenant.hex()} {first}"
            held.table.share(self._index.match(held.root, _array(text)))
            held.text = text[: len(held.table)]
        return len(held.table)

    def extend(self, sequence: int, base: int, tokens: Sequence[int]) -> Slots:
        """Replace all rows from ``base`` on, which must not be beyond those held, by rows for ``tokens``, at positions
        base+1, ...; returns the slots of all rows. Raises ``OutOfSlotsError``, then those from ``base`` on are gone."""
        self.truncate(sequence, base)
        held = self._held.setdefault(sequence, _Held(SlotTable(self._pool)))
        held.table.extend(len(tokens))
        if held.root is not None:
            held.text.extend(tokens)
        return held.table.slots.copy()

    def truncate(self, sequence: int, length: int) -> None:
        """Forget a sequence's rows from ``length`` on."""
        held = self._held.get(sequence)
        if held is not None and length < len(held.table):
            held.table.truncate(length)
            del held.text[length:]

    def share(self, sequence: int, *, has_tree: bool) -> None:
        """Let others find the rows of a prompt, which has been computed so far. ``has_tree``: it was the last part.

        What is decoded from there on follows when the sequence ends: row by row it would cost every step something.
        """
        held = self._held[sequence]
        if not held.has_tree:
            self._keep(held)
        held.has_tree |= has_tree

    def close(self, sequence: int) -> None:
        """The sequence has ended; its rows stay until their slots are needed."""
        held = self._held.pop(sequence, None)
        if held is not None:
            self._keep(held)
            held.table.free()

    def forget(self) -> None:
        """Let nobody find what was computed so far."""
        if self._index is not None:
            self._index.clear()

    def reset(self) -> None:
        """Forget all rows of everybody."""
        self.forget()
        for held in self._held.values():
            held.table.free()
        self._held.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot has the owners that it should have."""
        owners = [held.table.slots for held in self._held.values()]
        for held in self._held.values():
            assert held.root is None or len(held.text) == len(held.table), "rows without their tokens"
        if self._index is not None:
            self._index.check_integrity()
            owners.append(self._index.slots)
        self._pool.check_integrity(owners)

    def _keep(self, held: _Held) -> None:
        if self._index is None or held.root is None or not len(held.table):
            return
        own = held.table.slots
        kept = self._index.insert(held.root, _array(held.text), own)
        if not np.array_equal(kept, own):
            held.table.adopt(kept)  # somebody was faster: one copy is enough


def _array(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int64)
