"""The model as the router knows it: its description, its tokenizer and its chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle2.errors import RequestError, UnavailableError
from eagle2.protocol import Fleet, ModelDescription
from eagle2.router.parameters import check_prompt_ids, check_prompt_length
from eagle2.router.prompt_length import refuse_long_text
from eagle2.router.schemas import ChatBody, CompletionBody
from eagle2.router.settings import RouterSettings
from eagle2.text.chat import ChatTemplate
from eagle2.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that turns messages into token ids, under the name that clients use."""

    name: str
    description: ModelDescription
    tokenizer: Tokenizer
    template: ChatTemplate | None

    @classmethod
    def load(cls, description: ModelDescription, name: str | None = None) -> ServedModel:
        """Parse tokenizer and template; takes up to a second for a large vocabulary."""
        template = None
        if description.chat_template is not None:
            template = ChatTemplate(description.chat_template, description.bos_token, description.eos_token)
        return cls(
            name=name or description.name,
            description=description,
            tokenizer=Tokenizer(description.tokenizer_json),
            template=template,
        )

    def check_name(self, asked: str | None) -> None:
        """Raises RequestError with status 404 when another model is asked for. A name is never a path or a URL."""
        if asked is not None and asked != self.name:
            raise RequestError(
                f"The model {asked[:128]!r} is not served here; {self.name!r} is.",
                param="model",
                code="model_not_found",
                status=404,
            )

    def prompt_ids(self, body: ChatBody | CompletionBody, max_tokens: int) -> tuple[int, ...]:
        """The ids of the prompt, ``max_tokens`` at most.

        Raises RequestError for one that is too long or empty, or has ids outside the vocabulary.
        """
        if isinstance(body, ChatBody):
            param = "messages"
            ids = self._chat_ids(body, max_tokens)
        else:
            prompt, param = body.prompt, "prompt"
            if prompt == "":  # a start token alone is no prompt
                check_prompt_ids((), self.description.vocab_size, param)
            if isinstance(prompt, str):
                refuse_long_text(self.tokenizer, prompt, max_tokens, param)
                prompt = tuple(self.tokenizer.encode(prompt, add_special_tokens=True))
            ids = prompt
        check_prompt_length(len(ids), max_tokens, param)
        check_prompt_ids(ids, self.description.vocab_size, param)
        return ids

    def _chat_ids(self, body: ChatBody, max_tokens: int) -> tuple[int, ...]:
        if self.template is None:
            raise RequestError(
                f"The model {self.name!r} has no chat template; ask /v1/completions instead.",
                param="messages",
                code="no_chat_template",
            )
        # The template writes the start token itself.
        rendered = self.template.render([_rendered(message) for message in body.messages], add_generation_prompt=True)
        refuse_long_text(self.tokenizer, rendered, max_tokens, "messages")
        return tuple(self.tokenizer.encode(rendered, add_special_tokens=False))


def _rendered(message: Any) -> dict[str, str]:
    role = "system" if message.role == "developer" else message.role
    fields = {"role": role, "content": message.text}
    if message.name is not None:
        fields["name"] = message.name
    return fields


class ModelSource:
    """Asks the fleet for its model once and keeps the answer."""

    def __init__(self, fleet: Fleet, settings: RouterSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._model: ServedModel | None = None
        self._lock = asyncio.Lock()

    async def get(self) -> ServedModel:
        """The served model. Raises UnavailableError while the verifier does not describe one."""
        if self._model is None:
            async with self._lock:
                if self._model is None:
                    self._model = await self._load()
        return self._model

    async def _load(self) -> ServedModel:
        limit = self._settings.describe_timeout_s
        try:
            async with asyncio.timeout(limit):
                description = await self._fleet.describe()
        except TimeoutError as error:
            raise UnavailableError(f"The verifier did not describe its model within {limit:g} seconds.") from error
        load: Callable[..., ServedModel] = ServedModel.load
        return await asyncio.to_thread(load, description, self._settings.model_name)
