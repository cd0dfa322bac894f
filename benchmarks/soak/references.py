"""The runs that a soak's answers are compared with: alone, and without speculation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from benchmarks.soak.outcome import Outcome, question
from eagle2.config import Settings
from eagle2.engine.assemble import Checkpoint, tree_shape
from eagle2.engine.draft import DraftRunner
from eagle2.engine.engine import Engine, EngineLimits
from eagle2.engine.pair import Pair
from eagle2.engine.target import TargetRunner
from eagle2.errors import UnavailableError
from eagle2.models.target import TargetModel
from eagle2.protocol import GenerationRequest
from eagle2.telemetry.recorder import Recorder
from eagle2.transport.local import LocalLink


class References:
    """Fresh engines over networks that are loaded already. They keep no prefixes, and have room for everything."""

    def __init__(
        self, settings: Settings, checkpoint: Checkpoint, target: TargetModel, drafter: DraftRunner, incarnation: int
    ) -> None:
        self._settings, self._checkpoint, self._target = settings, checkpoint, target
        self._drafter, self._incarnation = drafter, incarnation
        self._alone: dict[GenerationRequest, Outcome] = {}

    def alone(self, outcome: Outcome) -> Outcome:
        """The request in an engine of its own; equal questions are asked once."""
        request = question(outcome.request)
        if request not in self._alone:
            engine = self._engine(1, drafts=request.speculation)
            self._alone[request] = _answers(engine, [(outcome.number, request)])[0]
        return self._alone[request]

    def plain(self, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """All of them without a draft, several at once."""
        engine = self._engine(self._settings.engine.max_sequences, drafts=False)
        return _answers(engine, [(outcome.number, question(outcome.request)) for outcome in outcomes])

    def _engine(self, max_sequences: int, *, drafts: bool) -> Engine:
        settings, checkpoint, stats = self._settings.engine, self._checkpoint, Recorder()
        shape = tree_shape(self._settings)
        slots = max_sequences * (checkpoint.max_model_len + shape.num_nodes)
        pair = Pair(self._connect if drafts else None, stats, incarnation=1, timeout_s=600.0)
        limits = EngineLimits(checkpoint.max_model_len, max_sequences, settings.prefill_chunk, prefix_cache=False)
        target = TargetRunner(self._target, slots, vocab_size=checkpoint.vocab_size)
        ends = frozenset(checkpoint.config.eos_token_ids)
        engine = Engine(target, checkpoint.tokenizer, pair, stats, limits, shape, ends)
        limit = time.monotonic() + 10
        while drafts and not pair.poll():
            if time.monotonic() > limit:
                raise UnavailableError("The engine for one request found no proposer within 10 s.")
            time.sleep(0.0005)
        return engine

    def _connect(self) -> LocalLink:
        return LocalLink(self._drafter, incarnation=self._incarnation)


def _answers(engine: Engine, requests: list[tuple[int, GenerationRequest]]) -> list[Outcome]:
    outcomes = [Outcome(number, request) for number, request in requests]
    for outcome in outcomes:
        engine.submit(outcome.request, outcome.add)
    for _ in itertools.count():
        if not engine.step():
            break
    engine.stop()
    return outcomes
