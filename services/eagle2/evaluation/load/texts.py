"""Whether everybody gave the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle2.evaluation.load.cells import Load
from eagle2.evaluation.load.trace import Answer


@dataclass(frozen=True, slots=True)
class Lost:
    """An answer that had other tokens than another contender gave to the same prompt, first at ``position``."""

    contender: str
    load: str
    round: int
    prompt: str
    position: int


class Texts:
    """The longest answer seen for every prompt, which all others must agree with."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[int], bool]] = {}
        self.lost: list[Lost] = []
        self.compared = 0  # answers that another one stood beside

    def compare(self, contender: str, load: Load, number: int, answers: Sequence[Answer]) -> None:
        """An answer that was cut off, by its client or by ``max_tokens``, must be a beginning of the others."""
        for answer in answers:
            ids, has_ended = answer.token_ids, answer.finish_reason == "stop"
            known, known_has_ended = self._known.get(answer.prompt, ([], False))
            self.compared += bool(known)
            position = next((i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), None)
            if position is None and known and (len(ids) > len(known)) and known_has_ended:
                position = len(known)
            if position is None and (len(ids) < len(known)) and has_ended:
                position = len(ids)
            if position is not None:
                self.lost.append(Lost(contender, load.name, number, answer.prompt, position))
            elif len(ids) > len(known) or has_ended:
                self._known[answer.prompt] = ids, has_ended or known_has_ended
