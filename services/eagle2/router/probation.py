"""Who has crashed a verifier? Decisions alone: no clock, no waiting, no network.

A crash ends many requests at once, and one of them may be its reason. All are *suspects*, and a suspect is retried *on
probation*: a replica has one suspect at a time, until that one has made progress. When a replica crashes
meanwhile, its suspect is guilty, and whoever else was there has nothing to do with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["innocent", "suspect", "guilty"]

_CLEARING_COMMITS = 2


@dataclass(slots=True, eq=False)
class Trial:
    """One attempt of one request at one replica (an incarnation).

    ``items`` counts all that came of it, ``commits`` what had tokens. ``verdict`` is set when the replica crashes.
    """

    request: str
    incarnation: str
    on_probation: bool
    items: int = 0
    commits: int = 0
    verdict: Verdict | None = None

    @property
    def is_cleared(self) -> bool:
        """Whether a request that crashes verifiers would have done so by now."""
        return self.commits >= _CLEARING_COMMITS


class Probation:
    """The suspects of one router, and where each is tried. Not thread-safe; one event loop uses it."""

    def __init__(self) -> None:
        # By request: crashes on probation of which it is not certain that the request had begun.
        self._suspects: dict[str, int] = {}
        self._trials: dict[str, dict[str, Trial]] = {}

    def is_suspect(self, request: str) -> bool:
        return request in self._suspects

    def may_start(self, request: str, incarnation: str) -> bool:
        """Whether the request may be sent there now."""
        if request not in self._suspects:
            return True
        return not any(trial.on_probation for trial in self._trials.get(incarnation, {}).values())

    def start(self, request: str, incarnation: str) -> Trial:
        """The request is being sent there. End it with ``crashed`` or ``ended``."""
        assert self.may_start(request, incarnation), f"{incarnation} has a suspect already"
        trial = Trial(request, incarnation, on_probation=request in self._suspects)
        self._trials.setdefault(incarnation, {})[request] = trial
        return trial

    def received(self, trial: Trial, *, has_tokens: bool) -> bool:
        """One item came. True when that has ended a probation: another suspect may go there now."""
        trial.items += 1
        trial.commits += has_tokens
        if not (trial.on_probation and trial.is_cleared and trial.verdict is None):
            return False
        trial.on_probation = False
        self._suspects.pop(trial.request, None)
        return True

    def crashed(self, trial: Trial) -> Verdict:
        """The stream of this attempt broke because its replica is gone. The first to say so decides for all there."""
        if trial.verdict is None:
            self._judge(trial.incarnation)
        assert trial.verdict is not None
        self._remove(trial)
        if trial.verdict == "guilty" and trial.is_cleared:
            # Its progress was still on its way when another stream told of the crash.
            self._suspects[trial.request] = 0
            return "suspect"
        return trial.verdict

    def ended(self, trial: Trial) -> None:
        """The attempt is over for another reason; a suspect stays one."""
        self._remove(trial)

    def forget(self, request: str) -> None:
        """The request is over."""
        self._suspects.pop(request, None)

    def _judge(self, incarnation: str) -> None:
        trials = self._trials.pop(incarnation)
        tried = next((trial for trial in trials.values() if trial.on_probation), None)
        # Of an attempt that gave no sign of life it is not certain that it had begun before the crash. One such case
        # may be chance, a second one hardly is.
        is_proven = tried is not None and (tried.items > 0 or self._suspects.get(tried.request, 0) > 0)
        for trial in trials.values():
            if trial is tried:
                trial.verdict = "guilty" if is_proven else "suspect"
                self._suspects[trial.request] = self._suspects.get(trial.request, 0) + 1
            elif is_proven:
                trial.verdict = "innocent"
            else:
                trial.verdict = "suspect"
                self._suspects.setdefault(trial.request, 0)

    def _remove(self, trial: Trial) -> None:
        trials = self._trials.get(trial.incarnation)
        if trials is None or trials.get(trial.request) is not trial:
            return
        del trials[trial.request]
        if not trials:
            del self._trials[trial.incarnation]
