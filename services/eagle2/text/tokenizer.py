"""A tokenizer as ``tokenizer.json`` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from eagle2.errors import ModelError, RequestError


class Tokenizer:
    """Text to token ids and back, as ``transformers`` does it for the same ``tokenizer.json``.

    Safe to share between threads: nothing changes after construction.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Raises ``ModelError`` where the JSON is not a tokenizer."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"The tokenizer cannot be read: {error}.") from error
        # Some published files carry the padding and truncation of their training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.json = tokenizer_json
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read ``tokenizer.json`` of a checkpoint folder. Raises ``ModelError`` where there is none."""
        path = folder / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{folder} has no tokenizer.json, the only tokenizer format that is supported.") from None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``. Chat text brings its special tokens; only plain text has them added.

        Raises ``RequestError`` for text that is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"The text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}."
            ) from None
        # The batch call lets other threads run meanwhile; a single one would stall the process for a long text.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Ids that the tokenizer does not know have no text."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Id of the token that is written exactly so, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def has_text(self, token_id: int) -> bool:
        """Whether ``decode`` gives text for the id: it is known and not special."""
        return token_id not in self.special_ids and self._tokenizer.id_to_token(token_id) is not None
