"""Text that comes out while tokens come in, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eagle2.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_WAIT = 8  # tokens; a character has at most 4 bytes, so more than this is not an unfinished character


class TextStream:
    """One generation's text, released as soon as nothing that follows can change it.

    The released parts together are ``tokenizer.decode`` of all ids, cut before the first stop string. Two things are
    held back: a character whose bytes are not complete, and a suffix that may begin a stop string. Each token costs a
    decode of a few tokens, not of the whole text.

    One difference is wanted: where a tokenizer writes rare characters as single-byte tokens, ``decode`` turns a whole
    run of them into replacement characters when one byte is broken; a stream has released the good ones before.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        assert all(stop_strings), "an empty stop string would stop everything"
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        # Ids are decoded in groups that start and end between characters. Groups whose text is out are kept as context
        # for the next: decoders treat the first token of a text in a way of their own (a leading space is dropped).
        self._context: list[list[int]] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._given = 0  # characters of the pending group's text that were handed on
        self._tail = ""  # text that may begin a stop string
        self._finished = False
        self.characters_released = 0
        self.stopped = False  # a stop string is complete

    def push(self, token_id: int) -> tuple[str, bool]:
        """Take one token; return the text that it releases and whether a stop string is complete now.

        Of several stop strings the one that begins first in the text counts. Tokens after a stop are ignored.
        """
        assert not self._finished, "a finished stream takes no tokens"
        if self.stopped:
            return "", True
        return self._release(self._decode(token_id)), self.stopped

    def finish(self) -> str:
        """Return all text that is still held back. The stream takes no tokens afterwards."""
        rest = "" if self.stopped else self._pending_text(self._pending)[self._given :]
        text = self._release(rest)
        tail, self._tail = self._tail, ""  # empty after a stop
        self.characters_released += len(tail)
        self._finished = True
        return text + tail

    def prime(self, ids: Iterable[int]) -> int:
        """Bring a fresh stream to the state after ``ids``; return how many characters these released.

        That is what a client has already been sent when another stream took the same ids before.
        """
        for token_id in ids:
            self.push(token_id)
        return self.characters_released

    def _decode(self, token_id: int) -> str:
        """Return the text that became certain."""
        if not self._tokenizer.has_text(token_id):
            return ""
        self._pending.append(token_id)
        text = self._pending_text(self._pending)
        if not text.endswith(_REPLACEMENT):
            certain = text[self._given :]
            self._settle(len(self._pending), len(text))
            return certain
        # Bytes that are no character yet show as replacement characters at the end.
        certain = text.rstrip(_REPLACEMENT)[self._given :]
        self._given += len(certain)
        if len(self._pending) > _LONGEST_WAIT:
            certain += self._give_up_on_bytes(text)
        return certain

    def _give_up_on_bytes(self, text: str) -> str:
        """Settle the longest part of a pending group of broken bytes that stays as it is; return its text."""
        for size in range(len(self._pending) - 1, 0, -1):
            head = self._pending_text(self._pending[:size])
            # Where the two parts read the same apart as together, no character lies across.
            if head + self._pending_text(self._pending[size:]) == text:
                certain = head[self._given :]
                self._settle(size, len(head))
                return certain
        return ""

    def _settle(self, size: int, length: int) -> None:
        """Move the first ``size`` pending ids, whose text has ``length`` characters, to the context."""
        self._context.append(self._pending[:size])
        self._pending = self._pending[size:]
        self._given = max(self._given - length, 0)
        # A context without text of its own would make the next token look like the first one.
        while len(self._context) > 1 and self._tokenizer.decode(_flat(self._context[1:])):
            del self._context[0]
        self._context_text = self._tokenizer.decode(_flat(self._context))

    def _pending_text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(_flat(self._context) + ids)[len(self._context_text) :]

    def _release(self, text: str) -> str:
        """Add certain text; return what can go out, setting ``stopped`` at a stop string."""
        text = self._tail + text
        found = [start for start in (text.find(stop) for stop in self._stops) if start >= 0]
        if found:
            self.stopped, self._tail = True, ""
            text = text[: min(found)]
        else:
            held = self._possible_stop(text)
            text, self._tail = text[: len(text) - held], text[len(text) - held :]
        self.characters_released += len(text)
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that a stop string begins with."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


def _flat(groups: list[list[int]]) -> list[int]:
    return [token_id for group in groups for token_id in group]
