"""How an adapter is spoken to: one JSON object a line. Runs in a peer's own environment, so nothing else is imported.

The adapter loads its model and writes ``{"versions": {...}}``. Then every ``{"prompt_ids": [...], "max_tokens": n}`` is
answered by ``{"token_ids": [...], "first_token_s": s, "total_s": s, "steps": n, "cpu_s": s}``, until the input ends.
What a library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

# The real stdout is for messages. What else writes to it, C libraries included, writes to stderr from the import on.
_OUT = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

TokenStream = Callable[[list[int], int], Iterator[list[int]]]
"""Answers a prompt (ids) greedily with so many tokens at most: the tokens as they come, one item a step."""


def serve(
    stream: TokenStream, packages: tuple[str, ...], cpu_s: Callable[[], float] = time.process_time, **told: Any
) -> None:
    """Answer until the input ends. ``packages``: whose versions are told, with ``told`` beside them.

    ``cpu_s``: seconds that all threads of all of the adapter's processes have computed.
    """

    def say(message: Mapping[str, Any]) -> None:
        _OUT.write(json.dumps(message) + "\n")
        _OUT.flush()

    say({"versions": {name: version(name) for name in packages}, **told})
    for line in sys.stdin:
        question = json.loads(line)
        say(_answer(stream, question["prompt_ids"], question["max_tokens"], cpu_s))


def _answer(stream: TokenStream, prompt_ids: list[int], max_tokens: int, cpu_s: Callable[[], float]) -> dict[str, Any]:
    ids: list[int] = []
    first = last = 0.0
    steps = 0
    cpu, began = cpu_s(), time.perf_counter()
    for tokens in stream(prompt_ids, max_tokens):
        if tokens:
            last = time.perf_counter() - began
            first = first or last
            steps += 1
            ids.extend(tokens)
    return {"token_ids": ids, "first_token_s": first, "total_s": last, "steps": steps, "cpu_s": cpu_s() - cpu}
