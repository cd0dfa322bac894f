"""Names of conversations, and fingerprints of how prompts begin."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle2.errors import RequestError
from eagle2.protocol import Replica
from eagle2.router.affinity import rendezvous
from eagle2.session.hashing import framed_hash
from eagle2.session.session import BLOCK_TOKENS, MAX_BLOCKS, Session, prefix_fingerprints, session_of

_TOKENS = st.lists(st.integers(0, 300), max_size=4 * BLOCK_TOKENS)
_FIRST_TURN = [("system", "Be brief."), ("user", "Hello")]


def _name(session: Session | None) -> str:
    assert session is not None
    return session.name


def test_the_first_name_that_is_there_decides() -> None:
    names = {"header": "a", "session_id": "b", "prompt_cache_key": "c", "user": "d"}
    by_last_given = {}
    while names:
        by_last_given[next(iter(names))] = _name(session_of("t", **names, messages=_FIRST_TURN))
        assert by_last_given[next(iter(names))] == _name(
            session_of("t", **{next(iter(names)): next(iter(names.values()))})
        )
        del names[next(iter(names))]
    assert len(set(by_last_given.values())) == 4


def test_header_and_body_name_the_same_session() -> None:
    assert session_of("t", header="chat 7") == session_of("t", session_id="chat 7")
    assert session_of("t", header="7") != session_of("t", user="7")


@pytest.mark.parametrize("blank", ["", " ", "\t \n"])
def test_a_blank_name_is_none(blank: str) -> None:
    assert session_of("t", header=blank, session_id=blank, prompt_cache_key=blank, user=blank) is None
    assert session_of("t", header=blank, user="u") == session_of("t", user="u")


def test_a_header_above_the_limit_is_refused_and_not_repeated() -> None:
    assert session_of("t", header="x" * 512) is not None
    with pytest.raises(RequestError, match="10240 characters") as caught:
        session_of("t", header="CANARY" + "x" * 10234)
    assert caught.value.status == 400
    assert "CANARY" not in str(caught.value)


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_names_of_different_tenants_never_meet(tenant: str, name: str, other: str, other_name: str) -> None:
    first, second = session_of(tenant, session_id=name), session_of(other, session_id=other_name)
    if first is not None and second is not None:
        assert (first == second) == ((tenant, name.strip()) == (other, other_name.strip()))


def test_parts_are_framed() -> None:
    assert framed_hash("org_1", "2345") != framed_hash("org_12345", "")


def test_all_turns_of_a_chat_are_one_session_and_only_the_first_opens_it() -> None:
    first = session_of("t", messages=_FIRST_TURN)
    later = session_of("t", messages=[*_FIRST_TURN, ("assistant", "Hi."), ("user", "More")])
    assert first is not None
    assert later is not None
    assert first.name == later.name
    assert (first.is_opening, later.is_opening) == (True, False)
    assert _name(session_of("u", messages=_FIRST_TURN)) != first.name
    assert _name(session_of("t", messages=[("system", "Be brief."), ("user", "Hell"), ("user", "o")])) != first.name


def test_chats_without_a_name_or_with_a_blank_one_spread() -> None:
    replicas = [Replica(f"replica-{i}", "1", 8) for i in range(4)]
    history = [("assistant", "Hi."), ("user", "More")]
    headers = [None] * 400 + [""] * 100
    sessions = [
        session_of("t", header=header, messages=[("user", f"Question {i}"), *history])
        for i, header in enumerate(headers)
    ]
    firsts = Counter(rendezvous(_name(session), replicas)[0].uid for session in sessions)
    assert max(firsts.values()) <= 1.3 * len(sessions) / len(replicas)
    # Chats that all begin alike are told apart by nothing, so their first turns are not bound to one replica.
    same = [session_of("t", header=header, messages=[("user", "Hello")]) for header in headers]
    assert all(session is not None and session.is_opening for session in same)


@pytest.mark.parametrize("messages", [[], [("system", "Be brief.")], [("assistant", "Hi."), ("user", "Hello")]])
def test_what_has_no_beginning_of_its_own_has_no_name(messages: list[tuple[str, str]]) -> None:
    assert session_of("t", messages=messages) is None


@given(_TOKENS, _TOKENS)
def test_the_deepest_shared_fingerprint_is_the_longest_common_prefix(prompt: list[int], other: list[int]) -> None:
    common = next(
        (i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), min(len(prompt), len(other))
    )
    pairs = zip(prefix_fingerprints("t", prompt), prefix_fingerprints("t", other), strict=False)
    assert [a == b for a, b in pairs].count(True) == common // BLOCK_TOKENS


@given(_TOKENS, st.integers(0, 4 * BLOCK_TOKENS))
def test_a_longer_prompt_keeps_the_fingerprints_of_its_beginning(prompt: list[int], cut: int) -> None:
    whole, part = prefix_fingerprints("t", prompt), prefix_fingerprints("t", prompt[:cut])
    assert whole[: len(part)] == part
    assert len(whole) == len(prompt) // BLOCK_TOKENS


def test_fingerprints_are_bounded_and_the_tenants_own() -> None:
    prompt = list(range(8192))
    fingerprints = prefix_fingerprints("t", prompt)
    assert len(fingerprints) == MAX_BLOCKS == len(set(fingerprints))
    assert not set(fingerprints) & set(prefix_fingerprints("u", prompt))
