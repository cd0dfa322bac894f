"""One generation of an engine in this process, with its times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from eagle2.errors import Eagle2Error, UnavailableError
from eagle2.protocol import FinishReason, GenerationRequest, SamplingParams, StopConditions, Verifier
from eagle2.telemetry import metrics

GREEDY = SamplingParams(seed=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Generation:
    """What came out, and when, in seconds from the request on: the first token and the last one.

    ``cycles`` counts the steps behind the first token, which the prompt's own forward pass gives; ``commits`` says how
    many tokens came at a time, that first one included.
    """

    token_ids: tuple[int, ...]
    first_token_s: float
    total_s: float
    cycles: int = 0
    accepted: int = 0
    drafted: int = 0
    finish_reason: FinishReason | None = None
    commits: tuple[int, ...] = ()

    @property
    def decode_tokens(self) -> int:
        """Tokens behind the first one."""
        return max(0, len(self.token_ids) - 1)

    @property
    def decode_s(self) -> float:
        return self.total_s - self.first_token_s

    @property
    def decode_rate(self) -> float:
        """Tokens per second behind the first one; 0 where there are none."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tau(self) -> float:
        """Mean acceptance length: committed tokens / cycles (paper, section 5); 0 without a cycle."""
        return self.decode_tokens / self.cycles if self.cycles else 0.0


def bench_request(
    prompt_ids: Sequence[int], max_tokens: int, *, speculation: bool, name: str, temperature: float = 0.0
) -> GenerationRequest:
    """Greedy, or sampled with a seed that is the prompt's: whoever answers it, the text is the same."""
    sampling = GREEDY
    if temperature > 0:
        sampling = SamplingParams(seed=crc32(repr(tuple(prompt_ids)).encode()), temperature=temperature)
    return GenerationRequest(
        request_id=name,
        tenant="local",
        prompt_ids=tuple(prompt_ids),
        sampling=sampling,
        stop=StopConditions(max_tokens=max_tokens),
        speculation=speculation,
    )


async def measure(
    verifier: Verifier, request: GenerationRequest, on_text: Callable[[str], None] = lambda _: None
) -> Generation:
    """Run one generation to its end; ``on_text`` gets the text as it is released.

    Raises ``Eagle2Error`` where the generation ends in an error.
    """
    began = time.perf_counter()
    first = last = 0.0
    ids: list[int] = []
    commits: list[int] = []
    async for commit in verifier.generate(request):
        last = time.perf_counter() - began
        if commit.token_ids and not ids:
            first = last
        if commit.token_ids:
            commits.append(len(commit.token_ids))
        ids.extend(commit.token_ids)
        if commit.text:
            on_text(commit.text)
            # Items that wait already are taken without a pause: Ctrl-C would come after the last of them.
            await asyncio.sleep(0)
        if commit.finish_reason == "error":
            raise Eagle2Error(commit.error or "The generation ended in an error that has no name.")
        if commit.finish_reason is not None:
            assert commit.usage is not None, "the last item of a stream carries its usage"
            accepted, rejected = commit.usage.accepted_prediction_tokens, commit.usage.rejected_prediction_tokens
            return Generation(
                token_ids=tuple(ids),
                first_token_s=first,
                total_s=last,
                cycles=commit.usage.cycles,
                accepted=accepted,
                drafted=accepted + rejected,
                finish_reason=commit.finish_reason,
                commits=tuple(commits),
            )
    raise Eagle2Error(f"The generation ended after {len(ids)} tokens without a reason.")


async def wait_until_paired(verifier: Verifier, timeout_s: float = 60.0) -> None:
    """Return once a proposer is paired: until then everything is decoded plainly.

    Raises ``UnavailableError`` where there is none in time.
    """
    key = metrics.PROPOSER_UP.sample()
    deadline = time.monotonic() + timeout_s
    while not (await verifier.stats()).get(key):
        if time.monotonic() > deadline:
            raise UnavailableError(f"No proposer was paired within {timeout_s:g} seconds.")
        await asyncio.sleep(0.01)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two runs of tokens differ, the end of the shorter one included; None if nowhere."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))
