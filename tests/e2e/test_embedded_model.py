"""The embedded model behind the real services: 20 varied prompts give the same token ids with speculation on and off,
greedy and seeded, alone and in a batch of 8, over HTTP, in the default dtype and in float32."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from e2e.server import Server
from eagle2.errors import ModelError
from eagle2.models.embedded import embedded_gguf

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

_STORY = "The lighthouse keeper counted the ships that passed in the fog, and wrote each name into a book. "
PROMPTS = (
    "Hi",
    "Once upon a time, in a village at the edge of a great forest, there lived",
    "What is the capital of France, and why is it famous?",
    "Explain in three sentences why the sky is blue.",
    "List the numbers from 1 to 60, separated by commas: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n        return n\n',
    "Write a Python class for a stack with push, pop and peek.",
    "SELECT name, COUNT(*) FROM orders WHERE",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    "请用中文写一首关于春天的短诗。",
    "日本の首都はどこですか?",
    "한국어로 인사해 주세요.",
    "\U0001f600\U0001f680 Tell me about emoji \U0001f44d\U0001f3fd and flags \U0001f1eb\U0001f1f7.",
    "Übersetze ins Deutsche: The weather is beautiful today.",
    "Repeat the word hello many times: hello hello hello hello",
    "| city | country |\n|---|---|\n| Paris | France |\n| Rome |",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "a\tb\tc\n\n\n   spaces   and\u2028separators\u00a0here",
    _STORY * 80 + "What did the lighthouse keeper write?",
)
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 1234}
MAX_TOKENS = 16
Outcome = tuple[list[int], str, str]


# Trees as they are served, and trees at every step: on a machine that is busy elsewhere the former may be few.
SERVED, FIXED = ("--dtype", "auto"), ("--dtype", "float32", "--tree-budget", "fixed", "--depth", "3", "--top-k", "4")


@pytest.fixture(scope="module", params=[SERVED, FIXED], ids=["served", "fixed trees in float32"])
def embedded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        embedded_gguf()
    except ModelError as missing:
        pytest.skip(str(missing))
    with Server(tmp_path_factory.mktemp("embedded") / "log", *request.param) as running:
        running.wait_until_ready()
        yield running


def ask(server: Server, prompt: str, fields: dict[str, Any], *, speculation: bool) -> tuple[Outcome, dict[str, Any]]:
    """Ids, text and finish reason of one chat, and its usage."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "return_token_ids": True,
        "speculation": speculation,
        **fields,
    }
    call = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=300) as response:
        answer = json.load(response)
    choice = answer["choices"][0]
    return (choice["token_ids"], choice["message"]["content"], choice["finish_reason"]), answer["usage"]


def test_prompts_are_as_varied_as_they_should_be(embedded: Server) -> None:
    lengths = [
        ask(embedded, prompt, {**GREEDY, "max_tokens": 1}, speculation=True)[1]["prompt_tokens"] for prompt in PROMPTS
    ]
    assert len(PROMPTS) == 20
    assert min(lengths) < 40  # the chat template itself is some 30 tokens
    assert max(lengths) > 1500


@pytest.mark.parametrize("fields", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_same_ids_on_and_off_alone_and_together(
    embedded: Server, fields: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    is_fixed = request.node.callspec.params["embedded"] is FIXED
    off = [ask(embedded, prompt, fields, speculation=False) for prompt in PROMPTS]
    on = [ask(embedded, prompt, fields, speculation=True) for prompt in PROMPTS]
    expected = [outcome for outcome, _ in off]
    assert [outcome for outcome, _ in on] == expected
    with ThreadPoolExecutor(8) as pool:
        for speculation in (True, False):
            together = list(pool.map(lambda p, s=speculation: ask(embedded, p, fields, speculation=s), PROMPTS))
            assert [outcome for outcome, _ in together] == expected
    accepted, rejected = (
        sum(usage["completion_tokens_details"][f"{what}_prediction_tokens"] for _, usage in on)
        for what in ("accepted", "rejected")
    )
    assert accepted + rejected > 0, "the head drafts"
    if is_fixed:
        assert accepted > MAX_TOKENS, "and some of it is right"
    assert all(usage["completion_tokens_details"]["rejected_prediction_tokens"] == 0 for _, usage in off)


def test_text_is_what_the_ids_say(embedded: Server) -> None:
    from eagle2.models.loader import resolve_target
    from eagle2.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve_target("embedded"))
    for prompt in PROMPTS[1:14:4]:
        (ids, text, _), _ = ask(embedded, prompt, GREEDY, speculation=True)
        assert tokenizer.decode(ids) == text
