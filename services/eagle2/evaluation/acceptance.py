"""Mean acceptance length (tau) of one method on one task: how good a draft is, whatever the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle2.evaluation.conversation import Turn
from eagle2.evaluation.measure import first_difference


@dataclass(frozen=True, slots=True)
class Cell:
    """What a measurement is of. ``tree`` is drafted tokens/depth/top_k, empty for plain decoding."""

    temperature: float
    task: str
    method: str
    tree: str = ""

    @property
    def name(self) -> str:
        """Fit for a file's name."""
        parts = (f"t{self.temperature:g}", self.task, self.method, self.tree.replace("/", "-"))
        return "_".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The answers of one cell. ``seconds`` is how long they took in all, many at once: no measure of speed."""

    cell: Cell
    turns: tuple[Turn, ...]
    seconds: float

    @property
    def cycles(self) -> int:
        return sum(turn.cycles for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Committed tokens, the first of each answer not counted: it comes from the prompt's forward pass."""
        return sum(turn.decode_tokens for turn in self.turns)

    @property
    def tau(self) -> float:
        """Committed tokens / cycles (paper, section 5); 0 without a cycle."""
        return self.tokens / self.cycles if self.cycles else 0.0

    def per_position(self, depth: int) -> tuple[float, ...]:
        """For each depth, the share of cycles that committed more than so many tokens; with 1 they add up to tau.

        The token behind the accepted ones is the target's own, so that is as many as were accepted so deep; only the
        last cycle of an answer counts what is left behind the cut.
        """
        runs = [run for turn in self.turns for run in turn.commits[1:]]
        return tuple(sum(run > d for run in runs) / len(runs) if runs else 0.0 for d in range(1, depth + 1))

    def as_json(self) -> dict[str, Any]:
        return {
            "temperature": self.cell.temperature,
            "task": self.cell.task,
            "method": self.cell.method,
            "tree": self.cell.tree,
            "seconds": self.seconds,
            "turns": [turn.as_json() for turn in self.turns],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Acceptance:
        cell = Cell(values["temperature"], values["task"], values["method"], values["tree"])
        return cls(cell, tuple(Turn.from_json(turn) for turn in values["turns"]), values["seconds"])


@dataclass(frozen=True, slots=True)
class Lost:
    """An answer that is not the one of plain decoding, first at ``position``. There must be none."""

    cell: Cell
    turn: str
    position: int


def lost_in(measured: Acceptance, plain: Acceptance) -> list[Lost]:
    """Every turn whose tokens are not those of plain decoding."""
    expected = {turn.name: turn.token_ids for turn in plain.turns}
    found = []
    for turn in measured.turns:
        position = first_difference(turn.token_ids, expected[turn.name])
        if position is not None:
            found.append(Lost(measured.cell, turn.name, position))
    return found


def same_cycles(a: Sequence[Turn], b: Sequence[Turn]) -> bool:
    """Whether two measurements went through the same cycles, token by token."""
    return [(t.name, t.token_ids, t.commits) for t in a] == [(t.name, t.token_ids, t.commits) for t in b]
