"""The bodies that clients receive: whole answers and chunks, of chats and of completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from eagle2.protocol import Usage


class ReplyShape(Protocol):
    """How one kind of answer is laid out."""

    def whole(self, text: str, token_ids: tuple[int, ...], finish_reason: str, usage: Usage) -> dict[str, Any]: ...

    def opening(self) -> dict[str, Any] | None:
        """The chunk before all text, None where the kind has none."""
        ...

    def delta(self, text: str, token_ids: tuple[int, ...]) -> dict[str, Any]: ...

    def closing(self, finish_reason: str) -> dict[str, Any]: ...

    def counts(self, usage: Usage) -> dict[str, Any]:
        """The chunk behind all choices that carries the usage."""
        ...


def usage_object(usage: Usage) -> dict[str, Any]:
    """``usage`` as clients know it. Rejected tokens were drafted and not kept; nothing is charged twice."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


@dataclass(frozen=True, slots=True)
class _Head:
    """What every chunk of one answer repeats. ``prompt_ids`` is None unless the client asked for ids."""

    id: str
    created: int
    model: str
    include_usage: bool
    prompt_ids: tuple[int, ...] | None

    def _reply(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._reply(kind, choices)
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def _with_ids(self, choice: dict[str, Any], token_ids: tuple[int, ...]) -> dict[str, Any]:
        if self.prompt_ids is not None:
            choice["token_ids"] = list(token_ids)
        return choice

    def _with_prompt(self, reply: dict[str, Any]) -> dict[str, Any]:
        if self.prompt_ids is not None:
            reply["prompt_token_ids"] = list(self.prompt_ids)
        return reply


class ChatShape(_Head):
    """Answers of /v1/chat/completions."""

    def whole(self, text: str, token_ids: tuple[int, ...], finish_reason: str, usage: Usage) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        reply = self._reply("chat.completion", [self._with_ids(choice, token_ids)])
        return self._with_prompt({**reply, "usage": usage_object(usage)})

    def opening(self) -> dict[str, Any]:
        return self._with_prompt(self._part({"role": "assistant", "content": ""}, (), None))

    def delta(self, text: str, token_ids: tuple[int, ...]) -> dict[str, Any]:
        return self._part({"content": text}, token_ids, None)

    def closing(self, finish_reason: str) -> dict[str, Any]:
        return self._part({}, (), finish_reason)

    def counts(self, usage: Usage) -> dict[str, Any]:
        return {**self._reply("chat.completion.chunk", []), "usage": usage_object(usage)}

    def _part(self, delta: dict[str, str], token_ids: tuple[int, ...], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._chunk("chat.completion.chunk", [self._with_ids(choice, token_ids)])


class CompletionShape(_Head):
    """Answers of /v1/completions; chunks and whole answers look alike."""

    def whole(self, text: str, token_ids: tuple[int, ...], finish_reason: str, usage: Usage) -> dict[str, Any]:
        reply = self._reply("text_completion", [self._choice(text, token_ids, finish_reason)])
        return self._with_prompt({**reply, "usage": usage_object(usage)})

    def opening(self) -> dict[str, Any] | None:
        return self._with_prompt(self.delta("", ())) if self.prompt_ids is not None else None

    def delta(self, text: str, token_ids: tuple[int, ...]) -> dict[str, Any]:
        return self._chunk("text_completion", [self._choice(text, token_ids, None)])

    def closing(self, finish_reason: str) -> dict[str, Any]:
        return self._chunk("text_completion", [self._choice("", (), finish_reason)])

    def counts(self, usage: Usage) -> dict[str, Any]:
        return {**self._reply("text_completion", []), "usage": usage_object(usage)}

    def _choice(self, text: str, token_ids: tuple[int, ...], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return self._with_ids(choice, token_ids)
