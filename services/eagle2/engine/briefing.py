"""What the proposer is told of a sequence: its beginning, and the rows that it lacks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle2.engine.pair import Pair
from eagle2.engine.sequence import Sequence
from eagle2.engine.target import TargetRunner
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder
from eagle2.transport.messages import DraftEntry, DraftTree, Opening

# Rows of one sequence that go to the proposer with one step; a longer span is brought over in several.
_SYNC_ROWS = 512
# So many of the newest rows are sent to a proposer that is thought to hold all those before them.
_NEWEST_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows ``base`` to ``end`` of a sequence, which the proposer is to be sent."""

    sequence: Sequence
    base: int
    end: int
    opening: Opening | None
    draft: bool = False


class Briefing:
    """Entries of draft steps, one for each sequence, and what is learnt from the answers.

    A sequence whose beginning the target knew is one whose rows the proposer may hold as well: it is asked before
    rows are sent, in a step that reads the rest of the prompt. All others are told of with their first rows, and no
    exchange is added.

    ``max_depth``: the most levels of a tree. ``max_model_len``: prompt and output together, in tokens.
    ``prefix_cache``: whether the proposer keeps rows for later sequences.
    """

    def __init__(
        self,
        target: TargetRunner,
        pair: Pair,
        stats: Recorder,
        *,
        max_depth: int,
        max_model_len: int,
        prefix_cache: bool,
    ) -> None:
        self._target, self._pair, self._stats = target, pair, stats
        self._max_depth, self._max_model_len, self._prefix_cache = max_depth, max_model_len, prefix_cache

    def entries(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, DraftEntry]]:
        """What the proposer lacks of sequences, and whether a tree is wanted. Nothing of one where nothing is to be
        said."""
        spans = [span for span in map(self._span, sequences) if span is not None]
        if not spans:
            return []
        counts = [span.end - span.base for span in spans]
        # One gather for all: a step has a few rows of each sequence.
        slots = np.concatenate([span.sequence.table.slots[span.base : span.end] for span in spans])
        ids = [token for span in spans for token in span.sequence.tokens[span.base + 1 : span.end + 1]]
        features = self._target.features_of(slots).split(counts)
        tokens = torch.tensor(ids, dtype=torch.int64).split(counts)
        return [(span.sequence, self._made(span, *rows)) for span, *rows in zip(spans, features, tokens, strict=True)]

    def _span(self, sequence: Sequence) -> _Span | None:
        if sequence.pairing != self._pair.pairing:
            sequence.pairing, sequence.held, sequence.is_opened = self._pair.pairing, 0, False
        cached = len(sequence.table)
        # Row i needs the token behind it, which a prompt knows already and a decoding sequence has as its root.
        ready = min(cached, len(sequence.tokens) - 1)
        fits = cached + self._max_depth + 1 < self._max_model_len
        if sequence.decodes and (sequence.num_left <= 1 or not fits):
            return None
        base = min(sequence.held, ready)
        if self._prefix_cache and sequence.may_be_held and base < ready:
            if not sequence.decodes:
                return _Span(sequence, 0, 0, Opening.of(sequence.request.tenant, sequence.tokens))
            if not sequence.is_opened and ready > _SYNC_ROWS:
                base = ready - _NEWEST_ROWS  # there was no time to ask: if not all is held, the answer says how much
        if base == ready:
            if not sequence.decodes or ready == 0:
                return None
            base -= 1  # the proposer keeps no outputs: the last row is run again
        opening = None
        if self._prefix_cache and not sequence.is_opened:
            opening = Opening.of(sequence.request.tenant, sequence.tokens[: base + 1])
        end = min(ready, base + _SYNC_ROWS)
        return _Span(sequence, base, end, opening, draft=sequence.decodes and end == ready)

    def answered(self, sequence: Sequence, entry: DraftEntry, reply: DraftTree) -> None:
        """Take note of what the proposer holds now."""
        rows = len(entry.tokens)
        self._stats.add(metrics.DRAFT_ROWS_SENT, rows)
        if entry.opening is not None:
            found = reply.held - rows - sequence.held
            self._stats.add(metrics.DRAFT_ROWS_FOUND, max(0, found))
            sequence.is_opened, sequence.may_be_held = True, False
        sequence.held = reply.held

    def _made(self, span: _Span, features: Tensor, tokens: Tensor) -> DraftEntry:
        sequence = span.sequence
        sequence.cycle += 1
        return DraftEntry(
            sequence=sequence.id,
            cycle=sequence.cycle,
            base=span.base,
            features=features,
            tokens=tokens,
            draft=span.draft,
            opening=span.opening,
        )
