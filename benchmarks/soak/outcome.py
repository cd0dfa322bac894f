"""What became of a request, and whether that is what it should be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eagle2.protocol import Commit, FinishReason, GenerationRequest, Usage


@dataclass(slots=True)
class Outcome:
    """All that one stream has brought. ``left``: its reader went away before the end came."""

    number: int
    request: GenerationRequest
    ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    usage: Usage | None = None
    left: bool = False

    def add(self, commit: Commit) -> None:
        """Take the stream's next item. Raises AssertionError for one behind the last."""
        assert self.finish_reason is None, f"request {self.number} got an item after its end"
        self.ids += commit.token_ids
        self.text += commit.text
        self.finish_reason, self.error, self.usage = commit.finish_reason, commit.error, commit.usage

    @property
    def is_whole(self) -> bool:
        """False when it ended before its time: the reader left, or the deadline passed."""
        return self.finish_reason in ("stop", "length")


def question(request: GenerationRequest) -> GenerationRequest:
    """What an answer may depend on: equal for requests that must get the same one."""
    return replace(request, request_id="", tenant="", priority="interactive", deadline=None)


def difference(found: Outcome, expected: Outcome) -> str | None:
    """How ``found`` is not what it should be, in one sentence; None when all is well.

    A whole answer has the ids, the text and the reason of ``expected``; one that ended early has a beginning of it.
    """
    if not expected.is_whole:
        return f"the run to compare with ended with {expected.finish_reason!r}: {expected.error}"
    if found.ids != expected.ids[: len(found.ids)]:
        place = next(i for i, (a, b) in enumerate(zip(found.ids, (*expected.ids, -1), strict=False)) if a != b)
        return f"token {place} is {found.ids[place]}, not {(*expected.ids, None)[place]}"
    if found.is_whole:
        for name in ("ids", "text", "finish_reason"):
            if getattr(found, name) != getattr(expected, name):
                return f"{name}: {getattr(found, name)!r}, not {getattr(expected, name)!r}"
        if found.usage is None or found.usage.completion_tokens != len(found.ids):
            return f"usage says {found.usage}, {len(found.ids)} tokens came"
        return None
    if not expected.text.startswith(found.text):
        return f"text {found.text!r} is no beginning of {expected.text!r}"
    if found.finish_reason == "error" and (found.request.deadline is None or "deadline" not in (found.error or "")):
        return f"it ended in an error: {found.error}"
    if found.finish_reason is None and not found.left:
        return f"it never ended; {len(found.ids)} tokens came"
    return None
