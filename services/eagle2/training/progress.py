"""Lines that say how far a long computation is, and when it will be done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """One line that is rewritten on a terminal; in a log file a line every ten seconds."""

    def __init__(self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._clock = label, clock
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._began = clock()
        self._began_at: float | None = None
        self._shown_at = float("-inf")

    def show(self, done: float, total: float, note: str = "") -> None:
        """Report ``done`` of ``total`` units; the first call counts as where this run began."""
        now = self._clock()
        if self._began_at is None:
            self._began, self._began_at = now, done
        finished = done >= total
        if now - self._shown_at < (0.2 if self._live else 10.0) and not finished:
            return
        self._shown_at = now
        share = done / total if total else 1.0
        advanced = done - self._began_at
        left = (now - self._began) * (total - done) / advanced if advanced > 0 else None
        text = f"{self._label} {_bar(share)} {share:6.1%}  {'' if left is None else f'{_duration(left)} left'}  {note}"
        if self._live:
            self._stream.write(f"\r{text}\x1b[K" + ("\n" if finished else ""))
        else:
            self._stream.write(text.rstrip() + "\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """Write a line of its own."""
        self._stream.write(f"\r\x1b[K{text}\n" if self._live else f"{text}\n")
        self._stream.flush()


def _bar(share: float, width: int = 20) -> str:
    full = int(share * width)
    return "[" + "#" * full + "." * (width - full) + "]"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
