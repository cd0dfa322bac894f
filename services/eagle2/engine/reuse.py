"""What sequences take over from earlier ones that began alike, and leave behind for later ones."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from eagle2.engine.sequence import Sequence
from eagle2.kv_cache.prefix import PrefixIndex, Tokens
from eagle2.kv_cache.slots import SlotPool, Slots
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

# Fewer tokens than these are not waited for.
_WORTH_WAITING = 16


class PrefixReuse:
    """The prefix index as scheduler and engine use it; without ``enabled`` nothing is kept and nothing found.

    A slot keeps its feature along with its keys and values, so a prefix that is found serves both sides of a pair: what
    the proposer has not kept of it by itself is sent there, as it is of a prompt that was just read.
    """

    def __init__(self, pool: SlotPool, stats: Recorder, *, enabled: bool = True) -> None:
        self._pool, self._stats = pool, stats
        self._index = PrefixIndex(pool) if enabled else None
        self._evicted = 0

    def known(self, sequence: Sequence) -> Slots:
        """Slots of what is known of a sequence's tokens, never of its last one: that has to be computed."""
        if self._index is None:
            return np.empty(0, dtype=np.int32)
        return self._index.match(sequence.request.tenant, _array(sequence.tokens[:-1]))

    def num_to_allocate(self, sequence: Sequence) -> int:
        """Slots that a waiting sequence takes from those available when it is admitted: for what is not known of it,
        for the part that nobody uses now, and for its root."""
        return len(sequence.tokens) + 1 - self._pool.count_used(self.known(sequence))

    def take(self, sequence: Sequence) -> None:
        """Give a sequence that is still to be prefilled what has become known of its tokens."""
        if self._index is None or sequence.num_to_prefill <= 0 or sequence.looked_up == self._index.version:
            return
        start, first_time = len(sequence.table), sequence.looked_up < 0
        sequence.looked_up = self._index.version
        slots = self.known(sequence)
        if first_time:
            self._stats.add(metrics.PREFIX_CACHE_QUERIES, len(sequence.tokens) - 1)
        if len(slots) <= start:
            return
        sequence.table.adopt(slots)
        sequence.may_be_held = True
        self._stats.add(metrics.PREFIX_CACHE_HITS, len(slots) - start)
        # Of a sequence that was preempted, what it had read itself is no hit of its prompt.
        cached = max(0, min(len(slots), sequence.num_prompt) - max(start, sequence.num_read))
        sequence.num_read = max(sequence.num_read, len(slots))
        sequence.num_cached += cached
        self._stats.add(metrics.CACHED_PROMPT_TOKENS, cached)

    def keep(self, sequence: Sequence) -> None:
        """Leave what has been computed of a sequence to others. The sequence goes on with the index's slots."""
        length = min(len(sequence.table), len(sequence.tokens))
        sequence.num_read = max(sequence.num_read, length)
        if self._index is None or not length:
            return
        own = sequence.table.slots[:length]
        kept = self._index.insert(sequence.request.tenant, _array(sequence.tokens[:length]), own)
        if not np.array_equal(kept, own):
            sequence.table.adopt(kept)

    def is_coming(self, sequence: Sequence, count: int, planned: Iterable[tuple[Sequence, int]]) -> bool:
        """Whether at least half of the ``count`` tokens that a sequence could read in this step are read anyway, for
        others of its tenant. It then takes them over in the next one instead of reading them beside the others.

        planned: those others, and how many tokens are read for each."""
        if self._index is None:
            return False
        end = len(sequence.table) + max(_WORTH_WAITING, -(-count // 2))
        own = sequence.tokens[:end]
        return end < len(sequence.tokens) and any(
            other.request.tenant == sequence.request.tenant
            and end <= len(other.table) + number
            and other.tokens[:end] == own
            for other, number in planned
        )

    def clear(self) -> None:
        """Forget everything: what was computed cannot be trusted."""
        if self._index is not None:
            self._index.clear()

    def set_gauges(self) -> None:
        self._stats.set(metrics.KV_SLOTS_CACHED, self._pool.num_idle, side="target")
        if self._index is not None:
            self._stats.add(metrics.PREFIX_CACHE_EVICTIONS, self._index.num_evicted - self._evicted)
            self._evicted = self._index.num_evicted

    @property
    def slots(self) -> Slots:
        """Every slot of the index."""
        return np.empty(0, dtype=np.int32) if self._index is None else self._index.slots

    def check_integrity(self) -> None:
        if self._index is not None:
            self._index.check_integrity()


def _array(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int64)
