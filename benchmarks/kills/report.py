"""What a run has shown: which streams ended how, who waited, and how long the service took to be whole again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.kills.clients import Stream


@dataclass(slots=True)
class Kill:
    """``uid``: Serve's name of the replica. Times are monotonic; ``recovered``: the service was whole again."""

    kind: str
    uid: str
    at: float
    recovered: float = 0.0

    @property
    def recovery_s(self) -> float:
        return self.recovered - self.at


@dataclass(slots=True)
class Report:
    """``streams``: counts by what became of them. ``problems``: the streams that count against the service.

    Seconds, as count, p50, p99 and most. ``stalls`` are the largest gaps between two items around a kill: of streams
    that moved to another verifier, of all others that were open, and in the quiet run.
    """

    streams: dict[str, int]
    kills: dict[str, int]
    moves: dict[str, int]
    stalls: dict[str, dict[str, float]]
    recovery_s: dict[str, dict[str, float]]
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {"clean": self.is_clean, **asdict(self)}


def judge(
    streams: Sequence[Stream],
    answers: Mapping[tuple[int, int], Stream],
    kills: Sequence[Kill],
    moves: Mapping[str, list[tuple[str, str]]],
    quiet: Iterable[float],
) -> Report:
    """``answers``: the undisturbed run of each question. ``moves``: by stream, the replicas that it left and why."""
    counts = Counter[str]()
    problems: list[str] = []
    for stream in streams:
        fate = _fate(stream, answers[stream.key], kills)
        counts[fate] += 1
        if fate not in _FINE:
            problems.append(f"{stream.name} {fate}: {stream.problem or _difference(stream, answers[stream.key])}")
    moved: list[float] = []
    beside: list[float] = []
    for kill in kills:
        for stream in streams:
            if not stream.opened <= kill.at <= stream.ended:
                continue
            gap = stream.largest_gap(kill.at, kill.recovered)
            if gap is None:
                continue
            left = any(uid == kill.uid for uid, _ in moves.get(stream.name, ()))
            (moved if left else beside).append(gap)
    names = {stream.name for stream in streams}
    reasons = Counter(reason for name, ways in moves.items() if name in names for _, reason in ways)
    by_kind: dict[str, list[float]] = {}
    for kill in kills:
        by_kind.setdefault(kill.kind, []).append(kill.recovery_s)
    return Report(
        streams={"all": len(streams), **counts},
        kills=dict(Counter(kill.kind for kill in kills)),
        moves=dict(reasons),
        stalls={"moved": _summary(moved), "beside": _summary(beside), "quiet": _summary(list(quiet))},
        recovery_s={kind: _summary(seconds) for kind, seconds in sorted(by_kind.items())},
        problems=problems,
    )


_FINE = frozenset({"equal", "own router killed", "own router killed before an answer began"})


def _fate(stream: Stream, answer: Stream, kills: Sequence[Kill]) -> str:
    if stream.end == "finished":
        return "equal" if stream.said == answer.said else "different"
    routers = [kill for kill in kills if kill.kind == "router"]
    if stream.end == "broken" and any(kill.uid == stream.router for kill in routers):
        is_beginning = tuple(stream.token_ids) == tuple(answer.token_ids[: len(stream.token_ids)])
        return "own router killed" if is_beginning else "different"
    # No router has put its name on the response: it is the proxy that speaks, or nobody.
    around = any(kill.at <= stream.ended and stream.opened <= kill.recovered for kill in routers)
    if stream.router is None and around:
        return "own router killed before an answer began"
    return {"error": "lost: error event", "broken": "lost: no end", "refused": "lost: refused"}[str(stream.end)]


def _difference(stream: Stream, answer: Stream) -> str:
    pairs = enumerate(zip(stream.token_ids, answer.token_ids, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(stream.token_ids), len(answer.token_ids)))
    return (
        f"the same up to token {first} of {len(answer.token_ids)}, {len(stream.token_ids)} came; "
        f"{stream.finish_reason} and {answer.finish_reason}, usage {stream.usage} and {answer.usage}, "
        f"texts {'equal' if stream.text == answer.text else 'differ'}"
    )


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"count": 0}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"count": len(seconds), "p50": float(p50), "p99": float(p99), "most": float(max(seconds))}
