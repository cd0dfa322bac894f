"""What a model reads: text and conversations as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from eagle2.errors import ModelError
from eagle2.protocol import ModelDescription
from eagle2.text.chat import ChatTemplate
from eagle2.text.tokenizer import Tokenizer


class PromptEncoder:
    """Turns text into the ids that a model reads, as the HTTP API does."""

    def __init__(self, description: ModelDescription) -> None:
        self._name = description.name
        self._tokenizer = Tokenizer(description.tokenizer_json)
        self._template = None
        if description.chat_template is not None:
            self._template = ChatTemplate(description.chat_template, description.bos_token, description.eos_token)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def chat(self, text: str, system: str | None = None) -> tuple[int, ...]:
        """A user's message, with a system message before it. Raises ``ModelError`` without a chat template."""
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self._rendered(messages)

    def conversation(self, said: Sequence[str]) -> tuple[int, ...]:
        """What user and model said in turn, the user first and last; without a chat template one below the other."""
        if self._template is None:
            return self.raw("\n".join(said))
        return self._rendered([{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)])

    def raw(self, text: str) -> tuple[int, ...]:
        """A text to be continued as it stands."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True))

    def _rendered(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        if self._template is None:
            raise ModelError(f"The model {self._name!r} has no chat template: it can only continue a raw text (--raw).")
        # The template writes the start token itself.
        return tuple(self._tokenizer.encode(self._template.render(messages), add_special_tokens=False))
