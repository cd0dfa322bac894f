"""What is compared under load: one engine for each way to speculate, on the same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from eagle2.config import Settings
from eagle2.engine.assemble import (
    Checkpoint,
    build_engine,
    describe,
    load_checkpoint,
    load_target_model,
)
from eagle2.engine.pair import Connect
from eagle2.evaluation.load.proposer_process import ProposerProcess
from eagle2.evaluation.trees import shape_name
from eagle2.models.target import TargetModel
from eagle2.speculative.draft import TreeShape
from eagle2.transport.base import ProposerLink
from eagle2.verifier.service import VerifierService
from eagle2.verifier.start import connect_in_process, new_incarnation

OFF, ADAPTIVE = "off", "adaptive"

Proposers = Literal["process", "inline"]
"""Where trees are drafted: in a process of their own behind a socket, as served, or in the engine's own thread."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to speculate. ``shape``: every tree's, or the largest one where ``adaptive``; None: no speculation."""

    shape: TreeShape | None
    adaptive: bool = False

    @property
    def name(self) -> str:
        if self.shape is None:
            return OFF
        return ADAPTIVE if self.adaptive else f"fixed {shape_name(self.shape)}"

    def settings(self, common: Settings) -> Settings:
        """``common`` with this way to speculate."""
        if self.shape is None:
            return replace(common, model=replace(common.model, draft=None))
        engine = replace(
            common.engine,
            depth=self.shape.depth,
            top_k=self.shape.top_k,
            num_draft_tokens=self.shape.num_nodes - 1,
            tree_budget="adaptive" if self.adaptive else "fixed",
        )
        return replace(common, engine=engine)


class LoadedEngine:
    """A contender's engine, started. Assembled as a served one is, except that its target's weights are given."""

    def __init__(
        self,
        contender: Contender,
        common: Settings,
        checkpoint: Checkpoint,
        model: TargetModel,
        proposers: Proposers = "process",
    ) -> None:
        self.contender = contender
        settings = contender.settings(common)
        self._process: ProposerProcess | None = None
        connect: Connect | None = None
        incarnation = new_incarnation()
        if contender.shape is not None and proposers == "process":
            self._process = process = ProposerProcess(settings, checkpoint.fingerprint)

            def connect() -> ProposerLink:
                return process.connect(incarnation)

        elif contender.shape is not None:
            connect = connect_in_process(settings, checkpoint)

        self._engine = build_engine(settings, checkpoint, connect, incarnation, model)
        self.service = VerifierService(self._engine, describe(settings, checkpoint))

    def metrics(self) -> dict[str, float]:
        """The engine's counters and gauges by sample name."""
        return self._engine.stats.snapshot()

    def cpu_s(self) -> float:
        """Seconds that all threads of this process and of the engine's proposer have computed."""
        return time.process_time() + (self._process.cpu_s() if self._process else 0.0)

    def close(self) -> None:
        self.service.close()
        if self._process is not None:
            self._process.close()


class LoadedEngines:
    """All contenders' engines, by name. They share one set of target weights, so only one at a time may have work."""

    def __init__(self, contenders: Sequence[Contender], common: Settings, proposers: Proposers = "process") -> None:
        """Raises ``ModelError`` or ``UnavailableError`` where one of them cannot be had."""
        checkpoint = load_checkpoint(common.model)
        self.description = describe(common, checkpoint)
        deepest = max((c.shape.depth for c in contenders if c.shape), default=common.engine.depth)
        model = load_target_model(replace(common, engine=replace(common.engine, depth=deepest)), checkpoint)
        self._engines: dict[str, LoadedEngine] = {}
        try:
            for contender in contenders:
                self._engines[contender.name] = LoadedEngine(contender, common, checkpoint, model, proposers)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> LoadedEngine:
        return self._engines[name]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
