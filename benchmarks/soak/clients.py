"""The clients of a soak: they keep an engine's queue filled, leave when they lose patience, and write down all."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.soak.outcome import Outcome
from benchmarks.soak.traffic import Ask, Sizes
from eagle2.engine.engine import Engine
from eagle2.engine.sequence import Sequence as Running
from eagle2.protocol import Commit, GenerationRequest
from eagle2.telemetry import metrics

_STALL_S = 120.0  # without an item of any stream


class Clients:
    """Drive a started engine from the outside. ``at_once``: requests that are open at the same time, queued ones too.

    ``on_end(n)`` is called when ``n`` requests have ended in all, in the thread of ``ask``.
    """

    def __init__(
        self, engine: Engine, sizes: Sizes, *, at_once: int = 20, on_end: Callable[[int], None] = lambda _: None
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._engine, self._sizes, self._at_once, self._on_end = engine, sizes, at_once, on_end
        self._items: queue.SimpleQueue[tuple[int, Commit]] = queue.SimpleQueue()
        self._open: dict[int, Running] = {}
        self._leaving: dict[int, int] = {}  # request -> items after which its client leaves
        self._seen = 0
        self._ended = 0

    def ask(self, asks: Sequence[Ask]) -> None:
        """Have all of them answered, the next as soon as there is a place. Raises RuntimeError when nothing moves."""
        waiting = list(reversed(asks))
        while waiting or self._open:
            while waiting and len(self._open) < self._at_once:
                self._submit(waiting.pop())
            self._leave()
            if not self._open:
                continue
            try:
                number, commit = self._items.get(timeout=_STALL_S)
            except queue.Empty:
                raise RuntimeError(f"No item came for {_STALL_S:g} s; open are {sorted(self._open)}.") from None
            self._seen += 1
            outcome = self.outcomes[number]
            if not outcome.left:
                outcome.add(commit)
                if outcome.finish_reason is not None:
                    self._end(number)
        self._wait_until_idle()

    def _submit(self, ask: Ask) -> None:
        assert ask.number == len(self.outcomes), "requests are asked in order"
        request = self._request(ask)
        self.outcomes.append(Outcome(ask.number, request))
        self._open[ask.number] = self._engine.submit(request, partial(self._put, ask.number))
        if ask.patience is not None:
            self._leaving[ask.number] = self._seen + ask.patience

    def _put(self, number: int, commit: Commit) -> None:
        self._items.put((number, commit))

    def _request(self, ask: Ask) -> GenerationRequest:
        tenant, prompt = ask.tenant, ask.prompt
        if ask.continues is not None:
            earlier = self.outcomes[ask.continues]
            history = earlier.request.prompt_ids + earlier.ids
            if earlier.is_whole and len(history) + len(prompt) <= 2 * self._sizes.prompt:
                tenant, prompt = earlier.request.tenant, history + prompt
        return GenerationRequest(
            request_id=f"soak-{ask.number}",
            tenant=tenant,
            prompt_ids=prompt,
            sampling=ask.sampling,
            stop=ask.stop,
            speculation=ask.speculation,
            priority=ask.priority,
            deadline=None if ask.deadline_s is None else time.time() + ask.deadline_s,
        )

    def _leave(self) -> None:
        for number in [number for number, items in self._leaving.items() if items <= self._seen]:
            self.outcomes[number].left = True
            self._engine.cancel(self._open[number])
            self._end(number)

    def _end(self, number: int) -> None:
        del self._open[number]
        self._leaving.pop(number, None)
        self._ended += 1
        self._on_end(self._ended)

    def _wait_until_idle(self) -> None:
        """Those that nobody reads any more have ended too, and the proposer has been told."""
        stats = self._engine.stats
        limit = time.monotonic() + _STALL_S
        while any(
            (
                stats.get(metrics.NUM_REQUESTS_RUNNING),
                stats.get(metrics.NUM_REQUESTS_WAITING),
                stats.get(metrics.KV_SLOTS_USED, side="target"),
                stats.get(metrics.KV_SLOTS_USED, side="draft"),
            )
        ):
            if self._engine.failure is not None:
                raise RuntimeError(f"The engine failed: {self._engine.failure!r}") from self._engine.failure
            if time.monotonic() > limit:
                raise RuntimeError(f"Slots are held {_STALL_S:g} s after the last request: {stats.snapshot()}")
            time.sleep(0.05)
        while not self._items.empty():  # items that were on their way when a client left
            number, _ = self._items.get()
            assert self.outcomes[number].left, f"request {number} got an item after its end"
