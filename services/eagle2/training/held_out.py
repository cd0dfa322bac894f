"""How good a head is on text that it was not trained on: step by step, and as the engine would use it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle2.config import DType, EngineSettings, ModelSettings, Settings
from eagle2.evaluation.measure import Generation, bench_request, measure, wait_until_paired
from eagle2.evaluation.trees import PAPER, ShapedEngine
from eagle2.training.agreement import Agreement, measure_agreement
from eagle2.training.batches import Batch, epoch_order, make_batch
from eagle2.training.data import Example
from eagle2.training.features import FeatureStore
from eagle2.training.head import DraftHead
from eagle2.training.target import FrozenTarget

# Sequences decoded at once; tau does not depend on it.
_TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Quality:
    """tau: tokens a cycle of the engine with the paper's tree 60/6/10, greedy; None where it was not measured."""

    agreement: Agreement
    tau: float | None

    @property
    def score(self) -> float:
        """What the best head is chosen by."""
        return self.agreement.chain_tau if self.tau is None else self.tau

    def __str__(self) -> str:
        return f"{self.agreement}" + ("" if self.tau is None else f", tau {self.tau:.3f} with tree 60/6/10")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The last ``count`` of ``examples``, with features in ``store``; the first ``questions`` of them are answered.

    max_tokens: of an answer to one of these questions.
    """

    examples: Sequence[Example]
    store: FeatureStore
    count: int
    questions: int
    max_tokens: int

    @property
    def _first(self) -> int:
        return len(self.examples) - self.count

    def agreement(self, head: DraftHead, target: FrozenTarget, batch_tokens: int) -> Agreement:
        """The head's agreement with the recorded text."""
        return measure_agreement(head, self._batches(batch_tokens), target.embedding, target.lm_head)

    def tau(self, head: Path, target: Path, dtype: DType, device: str, threads: int | None) -> float | None:
        """Have the engine answer the questions with the head in folder ``head``. None where there is no question.

        The engine is a new one each time: it packs its weights when it loads them.
        """
        asked = self.examples[self._first : self._first + self.questions]
        prompts = {str(i): example.ids[: example.spans[0][0]].tolist() for i, example in enumerate(asked)}
        prompts = {name: ids for name, ids in prompts.items() if ids}
        if not prompts:
            return None
        longest, together = max(map(len, prompts.values())) + self.max_tokens, min(_TOGETHER, len(prompts))
        settings = Settings(
            model=ModelSettings(
                target=str(target), draft=str(head), draft_vocabulary="all", dtype=dtype, device=device,
                max_model_len=longest,
            ),
            engine=EngineSettings(
                max_sequences=together, kv_slots=together * (longest + PAPER.num_nodes), threads=threads
            ),
        )  # fmt: skip
        return asyncio.run(_tau(settings, list(prompts.values()), self.max_tokens))

    def _batches(self, max_tokens: int) -> Iterator[Batch]:
        lengths = [len(example) for example in self.examples]
        for batch in epoch_order(lengths, range(self._first, len(self.examples)), max_tokens, seed=0):
            yield make_batch(self.examples, batch, self.store.__getitem__)


async def _tau(settings: Settings, prompts: Sequence[Sequence[int]], max_tokens: int) -> float | None:
    """Committed tokens / cycles over the answers to ``prompts`` (token ids); None where no answer took a cycle."""
    engine = ShapedEngine(settings, [PAPER])
    places = asyncio.Semaphore(settings.engine.max_sequences)

    async def answer(ids: Sequence[int]) -> Generation:
        async with places:
            return await measure(engine.service, bench_request(ids, max_tokens, speculation=True, name="held-out"))

    try:
        await wait_until_paired(engine.service)
        answers = await asyncio.gather(*map(answer, prompts))
    finally:
        engine.close()
    cycles = sum(answer.cycles for answer in answers)
    return sum(answer.decode_tokens for answer in answers) / cycles if cycles else None
