"""Events: what any reader must get back, however it splits lines."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from eagle2.router.failures import encode_json
from eagle2.router.sse import DONE, event

ANY = st.text(st.characters(categories=["L", "Z", "C", "P"]))  # separators, controls and lone surrogates among them


@given(ANY)
def test_one_event_is_one_line_for_every_reader(text: str) -> None:
    raw = event({"text": text})
    assert raw.isascii()
    lines = raw.decode().splitlines()  # splits at U+2028, U+0085, form feeds and more
    assert len(lines) == 2
    assert lines[1] == ""
    assert raw.endswith(b"\n\n")
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}


@given(st.lists(ANY, min_size=1, max_size=4))
def test_events_split_at_blank_lines(texts: list[str]) -> None:
    raw = b"".join(event(text) for text in texts) + DONE
    blocks = raw.split(b"\n\n")
    assert blocks[-2:] == [b"data: [DONE]", b""]
    assert [json.loads(block[6:]) for block in blocks[:-2]] == texts


def test_json_is_compact() -> None:
    assert encode_json({"a": [1, None], "b": "\u2028"}) == b'{"a":[1,null],"b":"\\u2028"}'
