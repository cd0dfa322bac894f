"""The verifier's hold on its proposer: pairing in the background, one question at a time, nothing stale believed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eagle2.errors import LinkDownError
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.transport.base import ProposerLink
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStep, DraftTree

logger = logging.getLogger(__name__)

Connect = Callable[[], ProposerLink | None]
"""Finds and leases a proposer, None when there is none now. May block for a bounded time."""

Trees = Mapping[tuple[int, int], DraftTree]
"""By (sequence, cycle)."""


@dataclass(frozen=True, slots=True)
class Question:
    """A step that was sent and whose reply is still to be collected."""

    step: int
    asked: frozenset[tuple[int, int]]  # (sequence, cycle)
    since: float  # time.monotonic()


class Pair:
    """Asks the proposer for trees and survives its absence.

    Used by the engine thread; a helper thread does the connecting. ``pairing`` grows with each new link: rows that a
    sequence had sent to an earlier one count for nothing.

    ``draft`` asks and waits. ``ask`` and ``collect`` do so one after the other, with other work in between; meanwhile
    there is no second question.

    timeout_s: how long a step waits for its trees. hang_s: a proposer that owes an answer for longer is given up.
    """

    def __init__(
        self,
        connect: Connect | None,
        stats: Recorder,
        *,
        incarnation: int,
        timeout_s: float,
        hang_s: float = 10.0,
        retry_s: float = 0.2,
    ) -> None:
        self._connect, self._stats, self._incarnation = connect, stats, incarnation
        self._timeout_s, self._hang_s, self._retry_s = timeout_s, hang_s, retry_s
        self._link: ProposerLink | None = None
        self._found: ProposerLink | None = None
        self._step = 0
        self._open: Question | None = None
        self._owed: Question | None = None  # it was waited for in vain
        self._closed: list[int] = []
        self._down_since: float | None = time.monotonic() if connect else None
        self._wanted, self._stopped = threading.Event(), threading.Event()
        self.pairing = 0
        stats.set(metrics.PROPOSER_UP, 0)
        if connect is not None:
            self._wanted.set()
            threading.Thread(target=self._keep_pairing, name="eagle2-pairing", daemon=True).start()

    @property
    def is_up(self) -> bool:
        return self._link is not None

    def poll(self) -> bool:
        """Take over a link that the helper has found. True when there is a link."""
        if self._link is None and self._found is not None:
            self._link, self._found = self._found, None
            self.pairing += 1
            self._open = self._owed = None
            self._closed.clear()  # a proposer forgets all sequences when its lease changes
            self._count_down_time()
            self._down_since = None
            self._stats.add(metrics.PAIRINGS)
            self._stats.set(metrics.PROPOSER_UP, 1)
            logger.info("Paired with proposer incarnation %d.", self._link.incarnation)
        if self._link is None:
            self._count_down_time()
        return self._link is not None

    def forget(self, sequence: int) -> None:
        """Have the proposer free a sequence, with the next message."""
        self._closed.append(sequence)

    def flush(self) -> None:
        """Without a step to carry it: send what ``forget`` has gathered, and take an answer that is owed, which says
        what the proposer holds. Not while a question is open."""
        if self._open is None and self.poll() and self._is_free() and self._closed:
            self.draft([], TreeShape(1, 1, 1))

    def draft(self, entries: Sequence[DraftEntry], shape: TreeShape) -> Trees:
        """Trees by (sequence, cycle); an entry without one is decoded plainly. Never raises for a proposer's faults."""
        return self.collect(self.ask(entries, shape))

    def ask(self, entries: Sequence[DraftEntry], shape: TreeShape) -> Question | None:
        """Send a step without waiting for its trees; None when there is nobody to ask now."""
        assert self._open is None, "one question at a time"
        if self._link is None or not self._is_free():
            return None
        self._step += 1
        closed, self._closed = tuple(self._closed), []
        step = DraftStep(
            self._incarnation, self._step, shape.depth, shape.top_k, shape.num_nodes - 1, tuple(entries), closed
        )
        began = time.monotonic()
        try:
            self._link.send(step)
        except LinkDownError as error:
            self._drop(str(error))
            return None
        self._stats.add(metrics.DRAFT_SECONDS, time.monotonic() - began)
        asked = frozenset((entry.sequence, entry.cycle) for entry in entries)
        self._open = Question(self._step, asked, began)
        return self._open

    def collect(self, question: Question | None) -> Trees:
        """The trees that were asked for, as ``draft`` gives them; none when their proposer has been lost since."""
        if question is None or question is not self._open:
            return {}
        self._open = None
        began = time.monotonic()
        try:
            reply = self._await(question.step, began + self._timeout_s)
        except LinkDownError as error:
            self._drop(str(error))
            return {}
        self._stats.add(metrics.DRAFT_SECONDS, time.monotonic() - began)
        if reply is None:
            self._owed = question
            self._stats.add(metrics.DRAFT_TIMEOUTS)
            return {}
        trees: dict[tuple[int, int], DraftTree] = {}
        for tree in reply.trees:
            key = (tree.sequence, tree.cycle)
            if key in question.asked and key not in trees:
                trees[key] = tree
            else:
                self._stats.add(metrics.STALE_REPLIES)
        return trees

    def close(self) -> None:
        self._stopped.set()
        self._wanted.set()
        for link in (self._link, self._found):
            if link is not None:
                link.close()
        self._link = self._found = self._open = None

    def _is_free(self) -> bool:
        """False while the answer to an earlier step is still owed; too long, and the proposer is given up."""
        if self._owed is None:
            return True
        try:
            late = self._await(self._owed.step, 0.0)
        except LinkDownError as error:
            self._drop(str(error))
            return False
        if late is not None:
            self._stats.add(metrics.STALE_REPLIES)
            self._owed = None
            return True
        if time.monotonic() - self._owed.since > self._hang_s:
            self._drop(f"it has owed an answer for more than {self._hang_s:g} s")
        return False

    def _await(self, step: int, deadline: float) -> DraftReply | None:
        """The reply to ``step``; others are dropped and counted."""
        assert self._link is not None
        while True:
            reply = self._link.receive(max(0.0, deadline - time.monotonic()))
            if reply is None:
                return None
            if reply.step == step and reply.incarnation == self._link.incarnation:
                self._stats.set(metrics.KV_SLOTS_USED, reply.slots_used, side="draft")
                self._stats.set(metrics.KV_SLOTS_CACHED, reply.slots_cached, side="draft")
                self._stats.set(metrics.KV_SLOTS_CAPACITY, reply.slots_total, side="draft")
                return reply
            self._stats.add(metrics.STALE_REPLIES)

    def _drop(self, why: str) -> None:
        assert self._link is not None
        logger.warning("Lost the proposer (%s); decoding plainly until another one is found.", why)
        self._link.close()
        self._link = self._open = self._owed = None
        self._down_since = time.monotonic()
        self._stats.set(metrics.PROPOSER_UP, 0)
        self._stats.set(metrics.KV_SLOTS_USED, 0, side="draft")
        self._stats.set(metrics.KV_SLOTS_CACHED, 0, side="draft")
        self._wanted.set()

    def _count_down_time(self) -> None:
        if self._down_since is not None:
            now = time.monotonic()
            self._stats.add(metrics.FALLBACK_SECONDS, now - self._down_since)
            self._down_since = now

    def _keep_pairing(self) -> None:
        assert self._connect is not None
        while True:
            self._wanted.wait()
            if self._stopped.is_set():
                return
            try:
                link = self._connect()
            except Exception:
                logger.exception("Looking for a proposer failed.")
                link = None
            if self._stopped.is_set():
                if link is not None:
                    link.close()
                return
            if link is None:
                self._stopped.wait(self._retry_s)
            else:
                self._wanted.clear()
                self._found = link
