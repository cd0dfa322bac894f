"""What a load amounts to: rates, times and acceptance of one contender at one load in one round."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from eagle2.evaluation.load.trace import Trace
from eagle2.telemetry import metrics

# The time per token of fewer tokens than these says more about one cycle than about an answer.
_FEWEST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """``concurrency`` sequences at all times, or requests that arrive at ``rate`` a second."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.concurrency is not None else f"{self.rate:g} a second"


@dataclass(frozen=True, slots=True)
class Cell:
    """One contender under one load in one round. Times are in seconds.

    tokens: committed in the window of ``wall_s`` and ``cpu_s``. first_token_s: by request that was due in the window,
    from then on. token_s: by request, the time per output token behind its first commit in the window. gap_s: all
    times between two commits of a request. late_s: by request, how much later than due it was sent.
    tokens_per_commit: committed tokens / commits behind the first token, the mean acceptance length (tau).
    cycles: steps of the batch. drafted: nodes that were verified.
    """

    contender: str
    load: Load
    round: int
    tokens: int
    wall_s: float
    cpu_s: float
    first_token_s: tuple[float, ...]
    token_s: tuple[float, ...]
    gap_s: tuple[float, ...]
    late_s: tuple[float, ...]
    tau: float
    cycles: int
    drafted: int
    plain_cycles: int
    draft_s: float
    verify_s: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.wall_s

    @property
    def cpu_rate(self) -> float:
        """Tokens per second of CPU time, of all threads of all processes together."""
        return self.tokens / max(self.cpu_s, 1e-9)  # a clock may be too coarse for a short window


def cell_of(contender: str, load: Load, number: int, trace: Trace) -> Cell:
    """The part of ``trace`` between its readings."""
    begin, end = trace.begin.time, trace.end.time
    windows = [[(at, n) for at, n in answer.commits if begin < at <= end] for answer in trace.answers]
    gaps = [after - before for window in windows for (before, _), (after, _) in pairwise(window)]
    token_s = []
    for window in windows:
        tokens = sum(n for _, n in window[1:])
        if tokens >= _FEWEST_TOKENS:
            token_s.append((window[-1][0] - window[0][0]) / tokens)
    # An answer's first commit is that of its prompt and no cycle.
    cycles = [n for answer in trace.answers for at, n in answer.commits[1:] if begin < at <= end]
    due = [answer for answer in trace.answers if begin <= answer.due <= end]

    def grown(metric: metrics.Metric) -> float:
        key = metric.sample()
        return trace.end.metrics.get(key, 0.0) - trace.begin.metrics.get(key, 0.0)

    return Cell(
        contender=contender,
        load=load,
        round=number,
        tokens=sum(n for window in windows for _, n in window),
        wall_s=end - begin,
        cpu_s=trace.end.cpu_s - trace.begin.cpu_s,
        first_token_s=tuple(s for answer in due if (s := answer.first_token_s) is not None),
        token_s=tuple(token_s),
        gap_s=tuple(gaps),
        late_s=tuple(answer.sent - answer.due for answer in due),
        tau=sum(cycles) / len(cycles) if cycles else 0.0,
        cycles=int(grown(metrics.CYCLES)),
        drafted=int(grown(metrics.NUM_DRAFT_TOKENS)),
        plain_cycles=int(grown(metrics.TREE_BUDGET_PLAIN_STEPS)),
        draft_s=grown(metrics.DRAFT_SECONDS),
        verify_s=grown(metrics.VERIFY_SECONDS),
    )
