"""A fleet without models: its replicas say what context, seed and position imply, and die, hang and drain as told."""

from __future__ import annotations

import asyncio
import hashlib
import random
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from eagle2.errors import DrainingError, UnavailableError
from eagle2.protocol import (
    Commit,
    FinishReason,
    GenerationRequest,
    ModelDescription,
    Replica,
    SamplingParams,
    StopConditions,
    Usage,
)
from eagle2.text.detokenizer import TextStream
from eagle2.text.tokenizer import Tokenizer
from fakes.verifier import byte_tokenizer_json, describe

EOS = 257
_ALPHABET = "aabcde  .\u00e9\u00df\u6f22\u5b57\U0001f600"
_BLOCK = 16  # tokens of a cached block


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer_json())


def next_token(context: Sequence[int], num_prompt: int, seed: int) -> int:
    """A function of context, seed and position: one byte of a text of many alphabets, at times its end."""
    start = len(context)
    while start > num_prompt and 0x80 <= context[start - 1] < 0xC0:
        start -= 1
    if start > num_prompt and 0xC0 <= context[start - 1] < 0x100:
        start -= 1
    else:
        start = len(context)
    drawn = _draw(context[:start], seed)
    character = _ALPHABET[drawn % len(_ALPHABET)].encode()
    inside = len(context) - start
    if inside < len(character) and bytes(context[start:]) == character[:inside]:
        return EOS if not inside and drawn % 97 == 0 else character[inside]
    character = _ALPHABET[_draw(context, seed) % len(_ALPHABET)].encode()  # the one before is complete
    return EOS if _draw(context, seed) % 97 == 0 else character[0]


def _draw(context: Sequence[int], seed: int) -> int:
    digest = hashlib.blake2b(array("q", context).tobytes(), digest_size=8, key=seed.to_bytes(8, "big"))
    return int.from_bytes(digest.digest(), "big")


class Decoder:
    """What an engine does for one sequence, a token at a time; the ends are the engine's."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._tokens = [*request.prompt_ids, *request.output_ids]
        self._text = TextStream(tokenizer(), request.stop.stop_strings)
        released = self._text.prime(request.output_ids)
        assert released == request.characters_released, "the client has been sent what its tokens release"
        self.finish_reason: FinishReason | None = None

    @property
    def num_output(self) -> int:
        return len(self._tokens) - len(self._request.prompt_ids)

    def commit(self, size: int) -> tuple[tuple[int, ...], str]:
        """Up to ``size`` tokens and the text that they release; sets ``finish_reason`` at the end."""
        kept, text = [], ""
        stop = self._request.stop
        if self.num_output >= stop.max_tokens:
            self.finish_reason = "length"
        while len(kept) < size and self.finish_reason is None:
            token = next_token(self._tokens, len(self._request.prompt_ids), self._request.sampling.seed)
            self._tokens.append(token)
            kept.append(token)
            stopped = False
            is_end = (token == EOS and not stop.ignore_eos) or token in stop.stop_token_ids
            if not is_end:
                released, stopped = self._text.push(token)
                text += released
            if is_end or stopped:
                self.finish_reason = "stop"
            elif self.num_output >= stop.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._text.finish()
        return tuple(kept), text


def undisturbed(request: GenerationRequest) -> tuple[list[int], str, str]:
    """Ids, text and finish reason of the whole answer."""
    decoder = Decoder(request)
    ids, text = decoder.commit(1 << 30)
    assert decoder.finish_reason is not None
    return list(ids), text, decoder.finish_reason


def fleet_request(
    name: str, prompt: Sequence[int] = (1, 2, 3), *, seed: int = 0, max_tokens: int = 24, **fields: object
) -> GenerationRequest:
    """A request for the fake's model; ``stop``: its stop strings."""
    stop = tuple(fields.pop("stop", ()))  # type: ignore[call-overload]
    request = GenerationRequest(
        name, "t", tuple(prompt), SamplingParams(seed), StopConditions(max_tokens, stop_strings=stop)
    )
    return replace(request, **fields)  # type: ignore[arg-type]


@dataclass
class FakeReplica:
    """One life of one replica, and what it has counted."""

    identity: Replica
    pace_s: float = 0.0
    heartbeat_s: float = 0.02
    cache_blocks: int = 4096
    state: str = "up"  # up, hung, dead, draining, gone (drained: streams are to move)
    started: int = 0
    finished: int = 0
    aborted: int = 0
    running: int = 0
    peak: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    places: asyncio.Semaphore = field(init=False)
    _cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.places = asyncio.Semaphore(self.identity.max_sequences)

    def turn(self, state: str) -> None:
        """Streams notice at once."""
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()

    async def pause(self, seconds: float) -> None:
        """Let time pass, for ever when hung. Raises when the replica is dead or sends its streams away."""
        if self.state in ("up", "draining"):
            if not seconds:
                await asyncio.sleep(0)
            else:
                try:
                    async with asyncio.timeout(seconds):
                        await self.changed.wait()
                except TimeoutError:
                    pass
        while self.state == "hung":
            await self.changed.wait()
        if self.state == "dead":
            raise UnavailableError("The verifier of this request is gone.")
        if self.state == "gone":
            raise DrainingError("This verifier is shutting down.")

    def read(self, prompt_ids: Sequence[int]) -> int:
        """Take a prompt into the prefix cache; returns how many of its tokens were there."""
        blocks = [hash(tuple(prompt_ids[:end])) for end in range(_BLOCK, len(prompt_ids) + 1, _BLOCK)]
        found = 0
        while found < len(blocks) and blocks[found] in self._cache:
            found += 1
        for block in reversed(blocks):
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self.cache_blocks:
            self._cache.popitem(last=False)
        return found * _BLOCK


class FakeFleet:
    """Replicas ``r0``, ``r1`` … that one test tells what to do.

    Those that die stay in ``replicas()`` until ``notice()``, as with a real fleet. ``poison`` names requests that
    crash the replica, at the commit behind ``poison_after`` output tokens.
    """

    def __init__(
        self,
        count: int = 4,
        *,
        max_sequences: int = 8,
        pace_s: float = 0.0,
        cache_blocks: int = 4096,
        description: ModelDescription | None = None,
        poison: Callable[[GenerationRequest], bool] = lambda _: False,
        poison_after: int = 0,
        seed: int = 0,
    ) -> None:
        self._max_sequences, self._pace_s, self._cache_blocks = max_sequences, pace_s, cache_blocks
        self._description = description or describe()
        self._poison, self._poison_after = poison, poison_after
        self._random = random.Random(seed)
        self._lives = 0
        self.lives: list[FakeReplica] = []
        self._listed: dict[str, FakeReplica] = {}
        self.crashes: list[str] = []
        for number in range(count):
            self.start(f"r{number}")

    # What a test does

    def start(self, uid: str) -> FakeReplica:
        """A new life under this name, known to routers at once."""
        self._lives += 1
        identity = Replica(uid, f"{uid}.{self._lives}", self._max_sequences)
        life = FakeReplica(identity, self._pace_s, cache_blocks=self._cache_blocks)
        self.lives.append(life)
        self._listed[uid] = life
        return life

    def at(self, uid: str) -> FakeReplica:
        """The newest life under this name."""
        return next(life for life in reversed(self.lives) if life.identity.uid == uid)

    def kill(self, uid: str, *, noticed: bool = False) -> None:
        self.at(uid).turn("dead")
        if noticed:
            self.notice()

    def hang(self, uid: str) -> None:
        self.at(uid).turn("hung")

    def wake(self, uid: str) -> None:
        self.at(uid).turn("up")

    def drain(self, uid: str, *, move: bool = False, noticed: bool = True) -> None:
        """No new requests; with ``move`` the running ones go elsewhere too."""
        self.at(uid).turn("gone" if move else "draining")
        if noticed:
            self.notice()

    def restart(self, uid: str) -> FakeReplica:
        """Kill it, and have another life under the same name."""
        self.kill(uid)
        return self.start(uid)

    def notice(self) -> None:
        """Routers learn who takes no more requests."""
        self._listed = {uid: life for uid, life in self._listed.items() if life.state in ("up", "hung")}

    @property
    def running(self) -> int:
        return sum(life.running for life in self.lives)

    # eagle2.protocol.Fleet

    def replicas(self) -> tuple[Replica, ...]:
        return tuple(life.identity for life in self._listed.values())

    async def describe(self) -> ModelDescription:
        return self._description

    async def stats(self) -> dict[str, float]:
        up = [life for life in self._listed.values() if life.state == "up"]
        if not up:
            raise UnavailableError("No verifier answers.")
        return {"num_requests_running": float(up[0].running)}

    async def generate(self, replica: Replica, request: GenerationRequest) -> AsyncIterator[Commit]:
        life = next((life for life in self.lives if life.identity == replica), None)
        if life is None or life.state == "dead":
            raise UnavailableError("The verifier of this request is gone.")
        if life.state in ("draining", "gone"):
            raise DrainingError("This verifier is shutting down.")
        life.requests.append(request)
        life.started += 1
        life.running += 1
        life.peak = max(life.peak, life.running)
        try:
            await life.pause(0)
            yield Commit((), "")
            while life.places.locked():
                await life.pause(life.heartbeat_s)
                yield Commit((), "")
            async with life.places:
                async for commit in self._decode(life, request):
                    yield commit
            life.finished += 1
        except (asyncio.CancelledError, GeneratorExit):
            life.aborted += 1
            raise
        finally:
            life.running -= 1

    async def _decode(self, life: FakeReplica, request: GenerationRequest) -> AsyncIterator[Commit]:
        decoder = Decoder(request)
        cached = life.read(request.prompt_ids)
        life.prompt_tokens += len(request.prompt_ids)
        life.cached_tokens += cached
        cycles, accepted = 0, 0
        while decoder.finish_reason is None:
            await life.pause(life.pace_s)
            if self._poison(request) and decoder.num_output >= self._poison_after:
                self.crashes.append(life.identity.incarnation)
                life.turn("dead")
                await life.pause(0)
            is_first = not decoder.num_output
            ids, text = decoder.commit(1 if is_first else self._random.randint(1, 4))
            cycles += not is_first
            accepted += max(0, len(ids) - 1)
            usage = None
            if decoder.finish_reason is not None:
                usage = Usage(len(request.prompt_ids), decoder.num_output, cached, accepted, cycles, cycles)
            yield Commit(ids, text, decoder.finish_reason, usage)
