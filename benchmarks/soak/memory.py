"""What a process holds: memory, Python objects, threads and open files, before and after."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.outcome import Outcome
from eagle2.engine.sequence import Sequence
from eagle2.kv_cache.slots import SlotTable
from eagle2.protocol import GenerationRequest, Usage

_BOOKS = (Outcome, GenerationRequest, Usage)  # of every request, a soak keeps one of each


@dataclass(frozen=True, slots=True)
class Census:
    """``rss``: bytes of resident memory. ``objects``: tracked by the garbage collector, by type, a soak's own books
    left out. Of ``sequences`` and ``tables`` an idle engine needs none."""

    rss: int
    objects: Counter[str]
    sequences: int
    tables: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> Census:
        gc.collect()
        kinds = Counter(type(thing) for thing in gc.get_objects())
        names: Counter[str] = Counter()
        for kind, count in kinds.items():
            if kind not in _BOOKS:
                names[f"{kind.__module__}.{kind.__qualname__}"] += count
        return cls(
            rss=resident_bytes(),
            objects=names,
            sequences=kinds[Sequence],
            tables=kinds[SlotTable],
            threads=threading.active_count(),
            files=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        )

    def growth(self, earlier: Census, at_least: int = 50) -> dict[str, int]:
        """Types of which there are that many more than earlier."""
        more = {name: count - earlier.objects[name] for name, count in self.objects.items()}
        return {name: count for name, count in sorted(more.items()) if count >= at_least}


def resident_bytes(pid: int | str = "self") -> int:
    """Of a process; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
