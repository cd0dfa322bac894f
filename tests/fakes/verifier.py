"""A verifier without a model: it says what it is told to, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from eagle2.protocol import Commit, ErrorCode, GenerationRequest, ModelDescription, Usage

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
VOCAB_SIZE = 258  # 256 bytes and two special tokens


def byte_tokenizer_json() -> str:
    """A tokenizer whose ids are bytes; 256 starts a text and 257 ends one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(shifted)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    text = tokenizer.to_str()
    assert json.loads(text)
    return text


def describe(**changes: object) -> ModelDescription:
    """A description of the byte model; ``changes`` replace fields."""
    fields: dict[str, object] = {
        "name": "tiny/bytes",
        "created": 1_700_000_000,
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 512,
        "dtype": "float32",
        "tokenizer_json": byte_tokenizer_json(),
        "chat_template": TEMPLATE,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "eos_token_ids": (257,),
        "speculation": True,
        **changes,
    }
    return ModelDescription(**fields)  # type: ignore[arg-type]


class ForcedVerifier:
    """Yields ``texts``, one commit each (their bytes are their ids), then ends with ``stop``.

    ``before`` is raised instead of the first commit and ``after`` behind the last one; an ``error`` is reported in a
    last commit, with its ``error_code``. ``pause_s`` passes before every commit; ``endless`` repeats the texts until
    the reader closes.
    """

    def __init__(
        self,
        texts: Sequence[str] = ("Hello", " world"),
        *,
        description: ModelDescription | None = None,
        before: Exception | None = None,
        after: Exception | None = None,
        error: str | None = None,
        error_code: ErrorCode | None = None,
        pause_s: float = 0.0,
        endless: bool = False,
        stats: dict[str, float] | None = None,
    ) -> None:
        self.texts = list(texts)
        self.description = description or describe()
        self.before = before
        self.after = after
        self.error = error
        self.error_code = error_code
        self.pause_s = pause_s
        self.endless = endless
        self.counters = stats or {}
        self.down: Exception | None = None
        self.describes = 0
        self.requests: list[GenerationRequest] = []
        self.running = 0
        self.completed = 0
        self.aborted = 0
        self.commits = 0

    async def describe(self) -> ModelDescription:
        self.describes += 1
        if self.down is not None:
            raise self.down
        return self.description

    async def stats(self) -> dict[str, float]:
        if self.down is not None:
            raise self.down
        return self.counters

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        self.requests.append(request)
        self.running += 1
        try:
            async for commit in self._commits(request):
                self.commits += 1
                yield commit
            self.completed += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _commits(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        if self.before is not None:
            raise self.before
        count = 0
        while True:
            for index, text in enumerate(self.texts):
                await asyncio.sleep(self.pause_s)
                ids = tuple(text.encode())
                count += len(ids)
                last = index == len(self.texts) - 1 and not (self.endless or self.error or self.after)
                usage = Usage(len(request.prompt_ids), count, 1, 3, 2, index + 1) if last else None
                yield Commit(ids, text, "stop" if last else None, usage)
            if not self.endless:
                break
        if self.after is not None:
            raise self.after
        if self.error is not None:
            yield Commit((), "", "error", None, self.error, self.error_code)


class CountingVerifier(ForcedVerifier):
    """Obeys max_tokens: ``a`` again and again, ``accepted`` + 1 tokens by commit, the last commit cut."""

    def __init__(self, accepted: int) -> None:
        super().__init__()
        self.accepted = accepted

    async def _commits(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        left = request.stop.max_tokens
        cycles = 0
        while left:
            size = min(left, self.accepted + 1)
            left -= size
            cycles += 1
            usage = Usage(len(request.prompt_ids), request.stop.max_tokens, 0, 0, 0, cycles) if not left else None
            yield Commit((97,) * size, "a" * size, None if left else "length", usage)
