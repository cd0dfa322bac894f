"""The verifier's hold on its proposer: pairing in the background, one question at a time, nothing stale believed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from eagle2.errors import LinkDownError
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.transport.base import ProposerLink
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStep, DraftTree

logger = logging.getLogger(__name__)

Connect = Callable[[], ProposerLink | None]
"""Finds and leases a proposer, None when there is none now. May block for a bounded time."""


class Pair:
    """Asks the proposer for trees and survives its absence.

    Used by the engine thread; a helper thread does the connecting. ``pairing`` grows with each new link: rows that a
    sequence had sent to an earlier one count for nothing.

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
        self._owed: tuple[int, float] | None = None  # step without its reply, and since when
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
            self._owed = None
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
        """Send what ``forget`` has gathered when no step is going to carry it."""
        if self._closed and self.poll():
            self.draft([], TreeShape(1, 1, 1))

    def draft(self, entries: Sequence[DraftEntry], shape: TreeShape) -> dict[tuple[int, int], DraftTree]:
        """Trees by (sequence, cycle); an entry without one is decoded plainly. Never raises for a proposer's faults."""
        if self._link is None or not self._is_free():
            return {}
        self._step += 1
        closed, self._closed = tuple(self._closed), []
        step = DraftStep(
            self._incarnation, self._step, shape.depth, shape.top_k, shape.num_nodes - 1, tuple(entries), closed
        )
        asked = {(entry.sequence, entry.cycle) for entry in entries}
        began = time.monotonic()
        try:
            self._link.send(step)
            reply = self._await(self._step, began + self._timeout_s)
        except LinkDownError as error:
            self._drop(str(error))
            return {}
        self._stats.add(metrics.DRAFT_SECONDS, time.monotonic() - began)
        if reply is None:
            self._owed = (self._step, began)
            self._stats.add(metrics.DRAFT_TIMEOUTS)
            return {}
        trees: dict[tuple[int, int], DraftTree] = {}
        for tree in reply.trees:
            key = (tree.sequence, tree.cycle)
            if key in asked and key not in trees:
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
        self._link = self._found = None

    def _is_free(self) -> bool:
        """False while the answer to an earlier step is still owed; too long, and the proposer is given up."""
        if self._owed is None:
            return True
        step, since = self._owed
        try:
            late = self._await(step, 0.0)
        except LinkDownError as error:
            self._drop(str(error))
            return False
        if late is not None:
            self._stats.add(metrics.STALE_REPLIES)
            self._owed = None
            return True
        if time.monotonic() - since > self._hang_s:
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
                self._stats.set(metrics.KV_SLOTS_CAPACITY, reply.slots_total, side="draft")
                return reply
            self._stats.add(metrics.STALE_REPLIES)

    def _drop(self, why: str) -> None:
        assert self._link is not None
        logger.warning("Lost the proposer (%s); decoding plainly until another one is found.", why)
        self._link.close()
        self._link, self._owed = None, None
        self._down_since = time.monotonic()
        self._stats.set(metrics.PROPOSER_UP, 0)
        self._stats.set(metrics.KV_SLOTS_USED, 0, side="draft")
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
