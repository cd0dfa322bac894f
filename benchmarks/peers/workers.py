"""An adapter as a process: it loads once and answers one prompt after the other."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle2.errors import UnavailableError
from eagle2.evaluation.measure import Generation

ADAPTERS = Path(__file__).parent / "adapters"

# Threads of one system may spin for more work, for 0.2 s in vLLM by default; the next one is to have the cores.
_PAUSE_S = 0.3


class Worker:
    """A running adapter (``adapters/line_protocol.py``). Its log is what it writes to stderr."""

    def __init__(
        self, name: str, python: Path, adapter: str, arguments: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> None:
        """``environ`` is added to this process's. Start it; ``wait`` says when it has loaded."""
        self.name = name
        self.cpu_s: list[float] = []  # by answer
        self.about: dict[str, Any] = {}
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [str(python), str(ADAPTERS / adapter), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environ},
                text=True,
            )

    def wait(self) -> None:
        """Until it can be asked. Raises ``UnavailableError`` where it ends instead."""
        self.about = self._read()

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int) -> Generation:
        """Answer a prompt greedily, after a pause. Raises ``UnavailableError`` where the process has ended."""
        assert self._process.stdin is not None
        time.sleep(_PAUSE_S)
        try:
            self._process.stdin.write(json.dumps({"prompt_ids": list(prompt_ids), "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the reading says why
        answer = self._read()
        self.cpu_s.append(answer["cpu_s"])
        return Generation(
            tuple(answer["token_ids"]), answer["first_token_s"], answer["total_s"], cycles=answer["steps"] - 1
        )

    def close(self) -> None:
        """End it with its input; it is killed where that does not help."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise UnavailableError(f"{self.name} ended with status {status}; {self._log} says why.")
        answer: dict[str, Any] = json.loads(line)
        return answer
