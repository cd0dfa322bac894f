"""One generation: its tokens, its slots, and what the proposer holds of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from eagle2.kv_cache.slots import SlotTable
from eagle2.protocol import Commit, ErrorCode, FinishReason, GenerationRequest, Usage
from eagle2.speculative.sampling import TokenCounts, TokenRule
from eagle2.text.detokenizer import TextStream

Sink = Callable[[Commit], None]
"""Takes the items of a stream, from the engine thread; must not block."""


def rule_of(request: GenerationRequest) -> TokenRule:
    sampling = request.sampling
    return TokenRule(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        repetition=sampling.repetition_penalty,
        bias=dict(sampling.logit_bias),
    )


@dataclass(slots=True, eq=False)
class Sequence:
    """``tokens`` are prompt and output. The table holds those whose KV is cached; while decoding that is all but
    the last one, the root.

    ``held`` counts head rows that the proposer has confirmed, and ``is_opened`` says that it knows the sequence; both
    are valid while ``pairing`` is the pair's current one. ``may_be_held`` is set when a known prefix was taken over
    since the proposer was last asked: it may hold more rows than it has confirmed.
    ``num_cached`` counts prompt tokens that were found in the prefix cache, ``num_read`` the tokens whose KV has been
    there before (a preemption takes it away again), ``looked_up`` is the version of the index that was searched, -1
    before the first search. ``promoted`` is set on a batch sequence that is to be passed over no longer.
    """

    id: int
    request: GenerationRequest
    table: SlotTable
    text: TextStream
    sink: Sink
    end_ids: frozenset[int]
    length_limit: int
    rule: TokenRule
    tokens: list[int]
    counts: TokenCounts | None = None
    speculate: bool = True
    held: int = 0
    is_opened: bool = False
    may_be_held: bool = False
    pairing: int = -1
    cycle: int = 0
    cancelled: bool = False
    promoted: bool = False
    num_cached: int = 0
    num_read: int = 0
    looked_up: int = -1
    num_cycles: int = 0
    num_accepted: int = 0
    num_drafted: int = 0
    finish_reason: FinishReason | None = field(default=None)

    @property
    def is_deferrable(self) -> bool:
        """Whether interactive sequences go before it: it is a batch request that was not promoted."""
        return self.request.priority == "batch" and not self.promoted

    @property
    def rank(self) -> tuple[bool, int]:
        """The order of sequences, first come first: interactive before batch, old before new."""
        return self.is_deferrable, self.id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def has_root(self) -> bool:
        """False until the first token after the prompt is known."""
        return self.num_output > 0

    @property
    def num_to_prefill(self) -> int:
        """Tokens whose KV is still missing before the sequence can decode."""
        return len(self.tokens) - int(self.has_root) - len(self.table)

    @property
    def decodes(self) -> bool:
        """Whether it has read all that stands before its root: its next step takes a tree."""
        return self.has_root and self.num_to_prefill == 0

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return min(self.request.stop.max_tokens - self.num_output, self.length_limit - len(self.tokens))

    def commit(self, tokens: SequenceOf[int], accepted: int = 0) -> list[int]:
        """Append a committed run, checking after each token whether the generation ends there.

        The first ``accepted`` tokens are drafted ones; those behind a cut do not count as accepted. Returns the tokens
        that were kept; the released text goes to the sink together with them, at the end with reason and usage.
        Cached positions behind a cut are forgotten.
        """
        kept: list[int] = []
        text = ""
        for place, token in enumerate(tokens):
            self.tokens.append(token)
            kept.append(token)
            self.num_accepted += place < accepted
            if self.counts is not None:
                self.counts.add([token])
            stopped = False
            if token not in self.end_ids:
                released, stopped = self.text.push(token)
                text += released
            if token in self.end_ids or stopped:
                self.finish_reason = "stop"
            elif self.num_left <= 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        if self.finish_reason is None:
            self.sink(Commit(tuple(kept), text))
        else:
            self.table.truncate(min(len(self.table), len(self.tokens)))
            self.sink(Commit(tuple(kept), text + self.text.finish(), self.finish_reason, self.usage()))
        return kept

    def fail(self, sentence: str, code: ErrorCode = "generation_failed") -> None:
        """End the stream with an error. What may be the beginning of a stop string stays held back: another verifier
        that goes on with the stream takes it that nobody has seen it."""
        self.finish_reason = "error"
        self.sink(Commit((), "", self.finish_reason, self.usage(), sentence, code))

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_output,
            cached_tokens=self.num_cached,
            accepted_prediction_tokens=self.num_accepted,
            rejected_prediction_tokens=self.num_drafted - self.num_accepted,
            cycles=self.num_cycles,
        )
