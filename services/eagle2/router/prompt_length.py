"""A text that is far too long for a prompt is refused before it is tokenised whole.

Tokenising takes about a kilobyte of memory and several microseconds for each token, so a body of some megabytes would
cost a gigabyte and keep a thread busy for seconds, only to be refused.
"""

from __future__ import annotations

from eagle2.errors import RequestError
from eagle2.text.tokenizer import Tokenizer

_DIRECT_BYTES_PER_TOKEN = 8  # texts of fewer bytes than this by allowed token are tokenised as they are
_PIECE = 8192  # characters


def refuse_long_text(tokenizer: Tokenizer, text: str, most: int, param: str) -> None:
    """Raises RequestError for a text whose beginning alone has more than twice ``most`` tokens.

    The text is tokenised in pieces. A cut may split a token, and a pair of pieces may have a few tokens more than both
    together; nowhere near twice as many. What passes here still has to be counted whole.
    """
    if len(text) * 4 <= most * _DIRECT_BYTES_PER_TOKEN or len(text.encode()) <= most * _DIRECT_BYTES_PER_TOKEN:
        return
    count = 0
    for begin in range(0, len(text), _PIECE):
        count += len(tokenizer.encode(text[begin : begin + _PIECE], add_special_tokens=False))
        if count > 2 * most:
            raise RequestError(
                f"The first {min(begin + _PIECE, len(text))} characters of the prompt have {count} tokens, the most "
                f"are {most}.",
                param=param,
                code="context_length_exceeded",
            )
