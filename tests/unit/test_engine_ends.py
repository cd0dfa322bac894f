"""Where a generation ends inside a committed block: scenarios B06 (what stays cached), B12 (stops), B13 (counts)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from eagle2.engine.sequence import Sequence
from eagle2.speculative.draft import TreeShape
from eagle2.transport.base import DraftHandler
from fakes.drafts import OracleHandler, RandomHandler
from fakes.engines import BOS, EOS, INCARNATION, PROMPTS, Answer, EngineKit, plain, request

PROMPT = PROMPTS[2]
DEEP = TreeShape(6, 1, 7)


@pytest.fixture(scope="module")
def expected() -> Answer:
    """What the target says without any end but the length: 60 tokens."""
    return EngineKit(None).answer(request(PROMPT, max_tokens=60, ignore_eos=True))


def oracle(expected: Answer, change: Callable[[list[int]], list[int]] = lambda chain: chain) -> OracleHandler:
    """Knows the answer; blocks are then 1 token, and 7 in each cycle."""
    start = 1 + len(PROMPT.encode())
    return OracleHandler(lambda context: change(expected.ids[len(context) - start :]), incarnation=INCARNATION)


def kit_with(handler: DraftHandler) -> EngineKit:
    return EngineKit(handler, shape=DEEP)


def first_place(ids: list[int], place: int) -> bool:
    return ids.index(ids[place]) == place


def places(expected: Answer) -> list[int]:
    """Positions whose token occurs there for the first time, so that it can be made an end token."""
    return [i for i in range(1, 30) if first_place(expected.ids, i)]


def test_an_end_token_anywhere_in_a_block(expected: Answer) -> None:
    """B12 B: nothing behind it in ids, text or usage; it is counted itself and has no text."""
    covered = set()
    for place in places(expected):
        answer = kit_with(oracle(expected)).answer(
            request(PROMPT, max_tokens=60, stop_token_ids=[expected.ids[place]], ignore_eos=True)
        )
        assert answer.ids == expected.ids[: place + 1]
        assert answer.finish_reason == "stop"
        assert answer.text == bytes(expected.ids[:place]).decode()
        assert answer.usage.completion_tokens == place + 1
        in_block = (place - 1) % 7
        blocks = (place - 1) // 7
        # Accepted are the drafted tokens of the answer: 6 of 7 in a whole block, all of a cut one but a bonus.
        assert answer.usage.accepted_prediction_tokens == 6 * blocks + min(in_block + 1, 6)
        covered.add(in_block)
    assert len(covered) >= 5, "ends at most places of a block were tried"


def test_a_stop_string_anywhere_in_a_block(expected: Answer) -> None:
    """B12 A: completed at token k of a block, spanning blocks or not; text ends before it, ids at its last token."""
    text = expected.text
    for end in range(4, 27):
        for length in (1, 5):
            stop = text[end - length : end] if end >= length else ""
            if not stop or text.find(stop) != end - length:
                continue
            answer = kit_with(oracle(expected)).answer(request(PROMPT, max_tokens=60, stop=[stop], ignore_eos=True))
            assert answer.text == text[: end - length]
            assert answer.ids == expected.ids[:end]
            assert answer.usage.completion_tokens == end
            assert answer.finish_reason == "stop"


def test_the_earliest_of_several_stop_strings(expected: Answer) -> None:
    """B12 E: the later-listed one occurs first in the text."""
    text = expected.text
    early, late = text[8:12], text[20:25]
    assert text.find(late) == 20
    for stops in ([late, early], [early, late], [late, "never said", early]):
        answer = kit_with(oracle(expected)).answer(request(PROMPT, max_tokens=60, stop=stops, ignore_eos=True))
        assert answer.text == text[: text.find(early)]


def test_a_drafted_end_token_that_the_target_does_not_want(expected: Answer) -> None:
    """B12 C: generation goes on to its normal end."""
    for place in (0, 1, 3, 5):
        wrong = oracle(expected, lambda chain, place=place: [*chain[:place], EOS, *chain[place:]])  # type: ignore[misc]
        answer = kit_with(wrong).answer(request(PROMPT, max_tokens=40, ignore_eos=False))
        alone = EngineKit(None).answer(request(PROMPT, max_tokens=40))
        assert (answer.ids, answer.text, answer.finish_reason) == (alone.ids, alone.text, alone.finish_reason)


def test_ignore_eos_goes_through_it() -> None:
    """B12 D: the target's own end token, first obeyed, then ignored."""
    kit = EngineKit(None)
    prompt, how = PROMPTS[0], {"temperature": 0.8, "seed": 0}
    whole = kit.answer(request(prompt, max_tokens=60, ignore_eos=True, **how))
    assert EOS in whole.ids[1:-1]
    place = whole.ids.index(EOS)
    obeyed = kit.answer(request(prompt, max_tokens=60, **how))
    assert obeyed.ids == whole.ids[: place + 1]
    assert obeyed.finish_reason == "stop"
    start = 1 + len(prompt.encode())
    handler = OracleHandler(lambda context: whole.ids[len(context) - start :], incarnation=INCARNATION)
    drafted = kit_with(handler)
    assert drafted.answer(request(prompt, max_tokens=60, **how)).ids == obeyed.ids
    assert drafted.answer(request(prompt, max_tokens=60, ignore_eos=True, **how)).ids == whole.ids
    assert drafted.answer(request(prompt, max_tokens=place + 1, **how)).finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 13, 59])
@pytest.mark.parametrize("drafts", ["oracle", "random", "none"])
def test_exactly_max_tokens(expected: Answer, max_tokens: int, drafts: str) -> None:
    """B13: as many tokens as asked for, in ids, text and usage."""
    handlers: dict[str, DraftHandler | None] = {
        "oracle": oracle(expected),
        "random": RandomHandler(1, 258, incarnation=INCARNATION),
        "none": None,
    }
    answer = EngineKit(handlers[drafts], shape=DEEP).answer(request(PROMPT, max_tokens=max_tokens, ignore_eos=True))
    assert answer.ids == expected.ids[:max_tokens]
    assert answer.finish_reason == "length"
    assert answer.usage.completion_tokens == max_tokens
    assert answer.usage.prompt_tokens == 1 + len(PROMPT.encode())
    assert answer.usage.accepted_prediction_tokens <= max_tokens - 1


def test_nothing_behind_the_end_stays_in_the_cache(expected: Answer) -> None:
    """B06: when a sequence ends, its cached positions are a prefix of prompt and visible answer."""
    ends = {"length": {"max_tokens": 10}, "stop": {"stop": [expected.text[9:12]]}}
    for place in places(expected):
        ends[f"end token at {place}"] = {"stop_token_ids": [expected.ids[place]]}
    for name, how in ends.items():
        kit = kit_with(oracle(expected))
        cached: list[int] = []
        retire = kit.engine.departures.retire

        def spy(sequence: Sequence, cached: list[int] = cached, retire: Callable[[Sequence], None] = retire) -> None:
            cached[:] = sequence.tokens[: len(sequence.table)]
            assert len(sequence.table) <= len(sequence.tokens)
            retire(sequence)

        kit.engine.departures.retire = spy  # type: ignore[method-assign]
        answer = kit.answer(request(PROMPT, **{"max_tokens": 60, "ignore_eos": True, **how}))  # type: ignore[arg-type]
        visible = [BOS, *PROMPT.encode(), *answer.ids]
        assert cached == visible[: len(cached)], name
        assert len(cached) >= len(visible) - 1, "all but the last token's KV is there to be used again"


def test_the_next_turn_equals_a_cold_run(expected: Answer) -> None:
    """B06: history and a new line after an answer that ended inside a block."""
    kit = kit_with(oracle(expected))
    first = kit.answer(request(PROMPT, stop_token_ids=[expected.ids[places(expected)[3]]], ignore_eos=True))
    history = [BOS, *PROMPT.encode(), *first.ids, *b" and then "]
    second = request(history, max_tokens=20, ignore_eos=True)
    assert kit.answer(second).ids == EngineKit(None).answer(plain(second)).ids


@pytest.mark.parametrize("place", [13, 15, 17])
@pytest.mark.parametrize("ending", ["", "?"], ids=["it is said", "it only began"])
def test_an_error_does_not_release_what_may_be_a_stop_string(expected: Answer, ending: str, place: int) -> None:
    """A stream breaks off with a stop string half said and goes on elsewhere: together it is the whole one's text."""
    stop = expected.text[12:18] + ending
    assert expected.text.find(stop) == (-1 if ending else 12)
    clock = [0.0]
    kit = EngineKit(None, wall_clock=lambda: clock[0])
    asked = request(PROMPT, max_tokens=60, ignore_eos=True, stop=[stop], deadline=1.0)
    broken = kit.submit(asked)
    while len(broken.ids) < place:
        kit.engine.step()
    clock[0] = 2.0
    kit.run()
    assert broken.finish_reason == "error"
    assert broken.text == expected.text[:12], "the rest may still be cut off"
    rest = EngineKit(None).answer(replace(asked, deadline=None, output_ids=tuple(broken.ids)))
    assert broken.ids + rest.ids == (expected.ids if ending else expected.ids[:18])
    assert broken.text + rest.text == (expected.text if ending else expected.text[:12])
