"""What a request costs, in cycles and seconds of one place, learned from the answers that have finished."""

from __future__ import annotations

from eagle2.protocol.generation import Usage


class WorkEstimate:
    """Cycles that a request will take, and the seconds of a cycle.

    Cycles: prompt tokens by prefill chunk, and answer tokens by mean acceptance length. The answer is expected to be
    as long as answers are on average, ``max_tokens`` at most.
    """

    def __init__(self, prefill_chunk: int) -> None:
        raise NotImplementedError

    @property
    def learned(self) -> bool:
        """Whether any answer has finished yet; before that everything here is a guess."""
        raise NotImplementedError

    def cycles(self, prompt_tokens: int, max_tokens: int) -> float:
        """Estimated cycles of a request, above 0."""
        raise NotImplementedError

    def seconds(self, cycles: float) -> float:
        """How long one place is busy with so many cycles."""
        raise NotImplementedError

    def learn(self, usage: Usage, max_tokens: int, seconds: float) -> float:
        """Take in a finished answer that held its place for ``seconds``. Returns the cycles that it really took."""
        raise NotImplementedError
