"""What a request costs, in cycles and seconds of one place, learned from the answers that have finished."""

from __future__ import annotations

from dataclasses import dataclass

from eagle2.protocol.generation import Usage

_KEPT = 0.98  # what an older answer counts beside the next one: about the newest fifty decide


@dataclass
class _Ratio:
    """A ratio of two sums in which older parts fade; ``guess`` until there are any."""

    guess: float
    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float) -> None:
        self.above = self.above * _KEPT + above
        self.below = self.below * _KEPT + below

    @property
    def value(self) -> float:
        return self.above / self.below if self.below > 0 else self.guess


class WorkEstimate:
    """Cycles that a request will take, and the seconds of a cycle.

    Cycles: prompt tokens by prefill chunk, and answer tokens by mean acceptance length. The answer is expected to be
    as long as answers are on average, ``max_tokens`` at most: most clients name no bound, or one far too high.
    """

    def __init__(self, prefill_chunk: int) -> None:
        self._prefill_chunk = prefill_chunk
        self._acceptance_length = _Ratio(2.0)
        self._answer_tokens = _Ratio(256.0)
        self._cycle_seconds = _Ratio(0.05)
        self._answers = 0

    @property
    def learned(self) -> bool:
        """Whether any answer has finished yet; before that everything here is a guess."""
        return self._answers > 0

    def cycles(self, prompt_tokens: int, max_tokens: int) -> float:
        """Estimated cycles of a request, above 0."""
        answer = min(max_tokens, self._answer_tokens.value)
        return self._prefill_cycles(prompt_tokens) + answer / self._acceptance_length.value

    def seconds(self, cycles: float) -> float:
        """How long one place is busy with so many cycles."""
        return cycles * self._cycle_seconds.value

    def cycles_in(self, seconds: float) -> float:
        """How many cycles one place makes in that time."""
        return seconds / self._cycle_seconds.value

    def learn(self, usage: Usage, max_tokens: int, seconds: float) -> float:
        """Take in a finished answer that held its place for ``seconds``. Returns the cycles that it really took."""
        self._answers += 1
        tokens, cycles = usage.completion_tokens, usage.cycles
        if cycles > 0:
            self._acceptance_length.add(max(tokens, cycles), cycles)
        # An answer that was cut tells how long answers are only where it is longer than they were thought to be.
        if tokens < max_tokens or tokens > self._answer_tokens.value:
            self._answer_tokens.add(max(1, tokens), 1)
        taken = self._prefill_cycles(usage.prompt_tokens - usage.cached_tokens) + cycles
        if seconds > 0:
            self._cycle_seconds.add(seconds, taken)
        return taken

    def _prefill_cycles(self, tokens: int) -> int:
        return max(1, -(-tokens // self._prefill_chunk))
