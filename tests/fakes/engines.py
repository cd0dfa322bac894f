"""Engines over the golden models, stepped by the test itself: no threads, no servers, no waiting."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from eagle2.config import Overlap
from eagle2.engine.budget import AdaptiveBudget
from eagle2.engine.draft import DraftRunner
from eagle2.engine.engine import Engine, EngineLimits
from eagle2.engine.pair import Pair
from eagle2.engine.target import TargetRunner
from eagle2.models.draft import DraftModel
from eagle2.models.target import TargetModel
from eagle2.protocol import Commit, GenerationRequest, Priority, SamplingParams, StopConditions, Usage
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry.recorder import Recorder
from eagle2.text.tokenizer import Tokenizer
from eagle2.transport.base import DraftHandler, ProposerLink
from eagle2.transport.local import LocalLink
from fakes.verifier import byte_tokenizer_json
from golden_pair import load_head, load_target

BOS, EOS = 256, 257
_SHAPE = TreeShape(4, 4, 12)
INCARNATION = 7
PROMPTS = (
    "our neighbour buys the red mirror ",
    "the old sailor ",
    "the queen follows the silver ",
    "1 2 3 4 5 6 7 8 ",
    "a",
    "def f(x): return ",
    "der \u00fcberm\u00fctige \u6f22\u5b57 \U0001f600 ",
    "the rain. the rain. the rain. " * 8,
)

cached_target = cache(load_target)


@cache
def cached_head(name: str, dtype: torch.dtype) -> DraftModel:
    return load_head(name, cached_target(name, dtype), dtype)


def prompt_ids(text: str) -> tuple[int, ...]:
    return (BOS, *text.encode())


_numbers = itertools.count()


def request(
    prompt: str | Sequence[int],
    *,
    max_tokens: int = 32,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    speculation: bool = True,
    output_ids: Sequence[int] = (),
    deadline: float | None = None,
    tenant: str = "t",
    priority: Priority = "interactive",
    **sampling: object,
) -> GenerationRequest:
    values: dict[str, object] = {"seed": 0, "temperature": 0.0, **sampling}
    return GenerationRequest(
        request_id=f"r{next(_numbers)}",
        tenant=tenant,
        prompt_ids=prompt_ids(prompt) if isinstance(prompt, str) else tuple(prompt),
        sampling=SamplingParams(**values),  # type: ignore[arg-type]
        stop=StopConditions(max_tokens, tuple(stop), tuple(stop_token_ids), ignore_eos),
        speculation=speculation,
        output_ids=tuple(output_ids),
        deadline=deadline,
        priority=priority,
    )


@dataclass
class Answer:
    """All that came out of one stream."""

    commits: list[Commit] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for commit in self.commits for token in commit.token_ids]

    @property
    def text(self) -> str:
        return "".join(commit.text for commit in self.commits)

    @property
    def finish_reason(self) -> str | None:
        return self.commits[-1].finish_reason if self.commits else None

    @property
    def usage(self) -> Usage:
        usage = self.commits[-1].usage
        assert usage is not None
        return usage


class EngineKit:
    """An engine and its proposer's handler. ``links`` are those handed out, in order."""

    def __init__(
        self,
        handler: DraftHandler | None,
        *,
        model: str = "A",
        dtype: torch.dtype = torch.float32,
        target: TargetModel | None = None,
        num_slots: int = 4096,
        max_sequences: int = 8,
        prefill_chunk: int = 64,
        max_model_len: int = 512,
        prefix_cache: bool = True,
        max_token_gap_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
        shape: TreeShape = _SHAPE,
        budget: AdaptiveBudget | None = None,
        overlap: Overlap = "off",
        vocab_size: int = 258,
        wrap: Callable[[ProposerLink], ProposerLink] = lambda link: link,
        timeout_s: float = 30.0,
        hang_s: float = 30.0,
    ) -> None:
        self.handler = handler
        self.links: list[ProposerLink] = []
        self.wrap = wrap
        self.proposer_is_there = handler is not None
        self.stats = Recorder()
        self.pair = Pair(
            self._connect if handler is not None else None,
            self.stats,
            incarnation=1,
            timeout_s=timeout_s,
            hang_s=hang_s,
            retry_s=0.001,
        )
        self.target = TargetRunner(target or cached_target(model, dtype), num_slots, vocab_size=vocab_size)
        self.engine = Engine(
            self.target,
            Tokenizer(byte_tokenizer_json()),
            self.pair,
            self.stats,
            EngineLimits(max_model_len, max_sequences, prefill_chunk, prefix_cache, max_token_gap_s),
            shape,
            frozenset({EOS}),
            budget=budget,
            overlap=overlap,
            clock=clock,
            wall_clock=wall_clock,
        )
        if handler is not None:
            self.wait_for_pair()

    def _connect(self) -> ProposerLink | None:
        if not self.proposer_is_there:
            return None
        assert self.handler is not None
        link = self.wrap(LocalLink(self.handler, incarnation=INCARNATION))
        self.links.append(link)
        return link

    def wait_for_pair(self) -> None:
        limit = time.monotonic() + 10
        while not self.pair.poll():
            assert time.monotonic() < limit, "no pair after 10 s"
            time.sleep(0.001)

    def submit(self, asked: GenerationRequest) -> Answer:
        answer = Answer()
        self.engine.submit(asked, answer.commits.append)
        return answer

    def run(self, steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(steps):
            if not self.engine.step():
                return
        raise AssertionError(f"work is left after {steps} steps")

    def answers(self, *asked: GenerationRequest) -> list[Answer]:
        """All requests at once, to their ends; then nothing may be left behind on either side."""
        answers = [self.submit(one) for one in asked]
        self.run()
        self.check_idle()
        return answers

    def answer(self, asked: GenerationRequest) -> Answer:
        return self.answers(asked)[0]

    def check_idle(self) -> None:
        self.engine.scheduler.check_integrity()
        assert self.target.pool.num_used == 0
        if isinstance(self.handler, DraftRunner) and self.pair.is_up:
            for _ in range(12):  # a step carries what is to be freed to the proposer; a slow one takes some
                self.engine.step()
            self.handler.check_integrity()
            assert self.handler.pool.num_used == 0


def draft_head(
    model: str = "A",
    dtype: torch.dtype = torch.float32,
    *,
    num_slots: int = 4096,
    vocab_size: int = 258,
    prefix_cache: bool = True,
) -> DraftRunner:
    head = cached_head(model, dtype)
    return DraftRunner(head, num_slots, incarnation=INCARNATION, vocab_size=vocab_size, prefix_cache=prefix_cache)


def plain(asked: GenerationRequest) -> GenerationRequest:
    return replace(asked, speculation=False)
