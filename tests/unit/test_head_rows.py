"""Rows that a proposer holds: what it finds again, for whom, and that a tree over found rows is a cold one's.

A text's features are a function of its beginning alone, as the target's are: here of a hash of it.
"""

from __future__ import annotations

import hashlib
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eagle2.engine.draft import DraftRunner
from eagle2.engine.head_rows import HeadRows
from eagle2.kv_cache.slots import OutOfSlotsError, SlotPool
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep, DraftTree, Opening
from fakes.engines import INCARNATION, cached_head, draft_head
from fakes.frames import same_bits

DTYPES = [torch.float32, torch.bfloat16]
HIDDEN = 64
SYSTEM = list(b"the grey keeper of the harbour answers briefly, in plain words. ")


def feature(tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """(H,) of a text's last position."""
    seed = int.from_bytes(hashlib.blake2b(str(tokens).encode(), digest_size=6).digest(), "little")
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def entry_of(
    sequence: int,
    tokens: list[int],
    base: int = 0,
    *,
    draft: bool = True,
    opens: bool = True,
    tenant: str = "t",
    dtype: torch.dtype = torch.float32,
) -> DraftEntry:
    """All rows of a text from ``base`` on."""
    rows = [feature(tokens[: i + 1], dtype) for i in range(base, len(tokens) - 1)]
    return DraftEntry(
        sequence,
        0,
        base,
        torch.stack(rows) if rows else torch.empty(0, HIDDEN, dtype=dtype),
        torch.tensor(tokens[base + 1 :], dtype=torch.int64),
        draft,
        Opening.of(tenant, tokens[: base + 1]) if opens else None,
    )


def question(sequence: int, tokens: list[int], tenant: str = "t") -> DraftEntry:
    """How many rows of a text are held?"""
    nothing = torch.empty(0, dtype=torch.int64)
    opening = Opening.of(tenant, tokens)
    return DraftEntry(sequence, 0, 0, torch.empty(0, HIDDEN), nothing, draft=False, opening=opening)


def asked(runner: DraftRunner, *entries: DraftEntry, closed: tuple[int, ...] = ()) -> tuple[DraftTree, ...]:
    reply = runner.handle(DraftStep(2, 0, 3, 4, 12, entries, closed))
    runner.check_integrity()
    return reply.trees


def held(runner: DraftRunner, tokens: list[int], tenant: str = "t") -> int:
    """Rows of a text that are found by somebody new, who goes away again."""
    (answer,) = asked(runner, question(999, tokens, tenant))
    assert answer.status is DraftStatus.SYNCED
    asked(runner, closed=(999,))
    return answer.held


def same_tree(one: DraftTree, other: DraftTree) -> bool:
    return one.status == other.status == DraftStatus.OK and all(
        same_bits(getattr(one, name), getattr(other, name)) for name in ("tokens", "parents", "scores")
    )


@cache
def cold_tree(tokens: tuple[int, ...], dtype: torch.dtype = torch.float32) -> DraftTree:
    (tree,) = asked(draft_head(dtype=dtype), entry_of(1, list(tokens), dtype=dtype))
    return tree


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_second_turn_needs_only_its_new_rows(dtype: torch.dtype) -> None:
    runner = draft_head(dtype=dtype)
    first, second = SYSTEM, SYSTEM + list(b"and then? ")
    assert same_tree(asked(runner, entry_of(1, first, dtype=dtype))[0], cold_tree(tuple(first), dtype))
    (answer,) = asked(runner, question(2, second), closed=(1,))
    assert (answer.status, answer.held) == (DraftStatus.SYNCED, len(first) - 1)
    rest = entry_of(2, second, len(first) - 1, opens=False, dtype=dtype)
    assert len(rest.tokens) == len(second) - len(first)
    assert same_tree(asked(runner, rest)[0], cold_tree(tuple(second), dtype))


def test_decoded_rows_are_found_after_the_end_and_a_prompts_at_once() -> None:
    runner = draft_head()
    asked(runner, entry_of(1, SYSTEM))
    for length in (3, 5, 6):  # three cycles
        text = SYSTEM + list(b"and so ")[:length]
        base = runner._rows.num_held(1)
        asked(runner, entry_of(1, text, base, opens=False))
    assert held(runner, [*text, 1, 2]) == len(SYSTEM) - 1
    asked(runner, closed=(1,))
    assert held(runner, [*text, 1, 2]) == len(text) - 1
    assert runner.pool.num_used == 0


def test_a_prompt_that_comes_in_parts_is_shared_as_it_comes() -> None:
    """A question is answered after the rows of its step."""
    runner = draft_head()
    half = len(SYSTEM) // 2
    answers = asked(runner, question(2, SYSTEM), entry_of(1, SYSTEM[:half], draft=False))
    assert [(a.status, a.held) for a in answers] == [(DraftStatus.SYNCED, half - 1), (DraftStatus.SYNCED, half - 1)]
    answers = asked(runner, question(2, SYSTEM), entry_of(1, SYSTEM, half - 1, opens=False))
    assert [a.held for a in answers] == [len(SYSTEM) - 1] * 2
    # Two sequences, one set of slots.
    assert runner.pool.num_used == len(SYSTEM) - 1
    last = entry_of(2, SYSTEM, len(SYSTEM) - 2, opens=False)
    assert same_tree(asked(runner, last)[0], cold_tree(tuple(SYSTEM)))


def test_the_same_prompt_at_once_is_held_once() -> None:
    runner = draft_head()
    trees = asked(runner, *(entry_of(sequence, SYSTEM) for sequence in range(4)))
    assert all(same_tree(tree, cold_tree(tuple(SYSTEM))) for tree in trees)
    assert runner.pool.num_used == len(SYSTEM) - 1
    for sequence in range(4):  # and grow apart
        asked(runner, entry_of(sequence, [*SYSTEM, sequence, 5], len(SYSTEM) - 1, opens=False))
    assert runner.pool.num_used == len(SYSTEM) - 1 + 4 * 2
    asked(runner, closed=(0, 1, 2, 3))
    assert runner.pool.num_used == 0
    for sequence in range(4):
        assert held(runner, [*SYSTEM, sequence, 5, 6]) == len(SYSTEM) + 1


def test_row_i_is_known_by_the_token_behind_it_and_by_the_first() -> None:
    runner = draft_head()
    asked(runner, entry_of(1, [1, 2, 3, 4, 5]))
    asked(runner, closed=(1,))
    assert held(runner, [1, 2, 3, 4, 5]) == 4
    assert held(runner, [1, 2, 3, 9, 5]) == 2, "row 2 is made of the fourth token"
    assert held(runner, [9, 2, 3, 4, 5]) == 0, "the first token is part of every row"
    assert held(runner, [1]) == 0


def test_tenants_find_nothing_of_each_other() -> None:
    runner = draft_head()
    asked(runner, entry_of(1, SYSTEM, tenant="org_1"))
    assert [held(runner, SYSTEM, tenant) for tenant in ("org_12", "", "org_1\0", "org_1")] == [0, 0, 0, len(SYSTEM) - 1]
    asked(runner, closed=(1,))
    assert [held(runner, SYSTEM, tenant) for tenant in ("org_12", "", "org_1")] == [0, 0, len(SYSTEM) - 1]
    (tree,) = asked(runner, entry_of(2, SYSTEM, tenant="org_2"))
    assert same_tree(tree, cold_tree(tuple(SYSTEM)))
    assert runner.pool.num_used == len(SYSTEM) - 1
    assert runner.pool.num_idle == len(SYSTEM) - 1


def test_a_guess_that_was_too_high_is_told_what_is_there() -> None:
    runner = draft_head()
    text = SYSTEM + list(b"and")
    asked(runner, entry_of(1, SYSTEM))
    asked(runner, closed=(1,))
    (answer,) = asked(runner, entry_of(2, text, len(text) - 2))
    assert (answer.status, answer.held) == (DraftStatus.MISSING, len(SYSTEM) - 1)
    (tree,) = asked(runner, entry_of(2, text, answer.held, opens=False))
    assert same_tree(tree, cold_tree(tuple(text)))
    (tree,) = asked(runner, entry_of(3, text, len(text) - 4))
    assert same_tree(tree, cold_tree(tuple(text))), "and one that was right has its tree at once"


def test_the_same_opening_twice_loses_nothing() -> None:
    """An answer may be lost on its way, so a verifier asks again."""
    runner = draft_head()
    asked(runner, entry_of(1, SYSTEM))
    assert asked(runner, question(1, SYSTEM))[0].held == len(SYSTEM) - 1
    text = [*SYSTEM, 7]
    (tree,) = asked(runner, entry_of(1, text, len(SYSTEM) - 2))
    assert same_tree(tree, cold_tree(tuple(text)))
    (tree,) = asked(runner, entry_of(1, text, len(SYSTEM) - 2))
    assert same_tree(tree, cold_tree(tuple(text)))
    assert runner.pool.num_used == len(text) - 1


def test_what_nobody_opened_is_drafted_for_and_not_kept() -> None:
    runner = draft_head()
    (tree,) = asked(runner, entry_of(1, SYSTEM, opens=False))
    assert same_tree(tree, cold_tree(tuple(SYSTEM)))
    assert held(runner, SYSTEM) == 0
    asked(runner, closed=(1,))
    assert held(runner, SYSTEM) == 0
    assert runner.pool.num_free == runner.pool.num_slots


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    runner = DraftRunner(
        cached_head("A", torch.float32), 512, incarnation=INCARNATION, vocab_size=258, prefix_cache=False
    )
    (tree,) = asked(runner, entry_of(1, SYSTEM))
    assert same_tree(tree, cold_tree(tuple(SYSTEM)))
    assert held(runner, SYSTEM) == 0
    asked(runner, closed=(1,))
    assert runner.pool.num_free == 512


def test_the_oldest_go_before_anybody_is_told_that_it_is_full() -> None:
    """A pool of two texts and a beam; ten texts one after the other."""
    runner = draft_head(num_slots=2 * len(SYSTEM) + 8)
    texts = [[number, *SYSTEM[1:]] for number in range(10)]
    for number, text in enumerate(texts):
        (tree,) = asked(runner, entry_of(number, text))
        assert same_tree(tree, cold_tree(tuple(text)))
        asked(runner, closed=(number,))
    assert held(runner, texts[9]) == len(SYSTEM) - 1
    assert held(runner, texts[0]) == 0
    running = [asked(runner, entry_of(20 + i, [30 + i, *SYSTEM[1:]]))[0].status for i in range(3)]
    assert running == [DraftStatus.OK, DraftStatus.OK, DraftStatus.FULL], "what runs is not evicted"
    assert held(runner, texts[9]) < len(SYSTEM) - 1


def test_a_beam_is_never_short_of_what_it_was_promised() -> None:
    """Idle rows that one entry takes over are no longer there for the beam of another of the same step."""
    runner = draft_head(num_slots=len(SYSTEM) + 4 + 8)
    asked(runner, entry_of(1, SYSTEM), closed=())
    asked(runner, closed=(1,))
    other = entry_of(2, [200, 201, 202, 203])
    again = entry_of(3, SYSTEM, len(SYSTEM) - 2)
    statuses = [tree.status for tree in asked(runner, other, again)]
    assert statuses == [DraftStatus.OK, DraftStatus.FULL]
    (tree,) = asked(runner, again, closed=(2,))
    assert same_tree(tree, cold_tree(tuple(SYSTEM)))


def test_numbers_that_are_none_are_found_by_nobody() -> None:
    runner = draft_head()
    asked(runner, entry_of(1, SYSTEM))
    broken = entry_of(2, [5, 6, 7, 8])
    broken.features[1] = float("nan")
    assert asked(runner, broken)[0].status is DraftStatus.NON_FINITE
    assert held(runner, [5, 6, 7, 8]) == 0
    assert held(runner, SYSTEM) == len(SYSTEM) - 1, "a feature that was refused has spoilt nothing"
    overflowing = entry_of(3, [5, 6, 7, 8])
    overflowing.features.fill_(3e38)  # finite, but the head's sums of them are not
    assert asked(runner, overflowing)[0].status is DraftStatus.NON_FINITE
    assert held(runner, [5, 6, 7, 8]) == held(runner, SYSTEM) == 0, "what the head itself made may all be wrong"


def test_a_new_lease_begins_with_nothing() -> None:
    runner = draft_head()
    asked(runner, entry_of(1, SYSTEM), entry_of(2, [1, 2, 3]))
    asked(runner, closed=(1,))
    runner.reset()
    assert runner.pool.num_free == runner.pool.num_slots
    assert held(runner, SYSTEM) == 0
    runner.check_integrity()


def test_a_reply_says_how_many_slots_are_kept() -> None:
    runner = draft_head(num_slots=500)
    asked(runner, entry_of(1, SYSTEM))
    reply: DraftReply = runner.handle(DraftStep(2, 0, 3, 4, 12, (), closed=(1,)))
    assert (reply.slots_used, reply.slots_total, reply.slots_cached) == (0, 500, len(SYSTEM) - 1)


TEXTS = st.lists(st.integers(0, 2), min_size=2, max_size=14)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.sampled_from(["one", "two"]), st.booleans()), max_size=8), st.integers(20, 60))
def test_warm_trees_are_cold_trees(texts: list[tuple[list[int], str, bool]], num_slots: int) -> None:
    """Texts that begin alike, of two tenants, some asked about and some guessed, some ended, in a small pool."""
    runner = draft_head(num_slots=num_slots)
    known: set[tuple[str, tuple[int, ...]]] = set()
    for sequence, (text, tenant, ends) in enumerate(texts):
        (answer,) = asked(runner, question(sequence, text, tenant))
        assert answer.held == 0 or (tenant, tuple(text[: answer.held + 1])) in known
        base = min(answer.held, len(text) - 2)
        (tree,) = asked(runner, entry_of(sequence, text, base, opens=False))
        if tree.status is DraftStatus.OK:
            assert same_tree(tree, cold_tree(tuple(text)))
            known |= {(tenant, tuple(text[:end])) for end in range(2, len(text) + 1)}
        else:
            assert tree.status is DraftStatus.FULL
        if ends:
            asked(runner, closed=(sequence,))


class RowsMachine(RuleBasedStateMachine):
    """Sequences of two tenants that open, grow, are cut, shared and closed, beside what each slot was computed for."""

    @initialize(num_slots=st.integers(4, 40))
    def start(self, num_slots: int) -> None:
        self.pool = SlotPool(num_slots)
        self.rows = HeadRows(self.pool)
        self.texts: dict[int, tuple[str, list[int]]] = {}
        self.made: dict[int, tuple[str, tuple[int, ...]]] = {}  # slot: whose, and the tokens that the row is made of

    @rule(sequence=st.integers(0, 3), tenant=st.sampled_from(["one", "two"]), text=TEXTS)
    def open(self, sequence: int, tenant: str, text: list[int]) -> None:
        found = self.rows.open(sequence, Opening.of(tenant, text))
        assert found <= len(text) - 1
        self.texts[sequence] = tenant, text[: found + 1]

    @rule(sequence=st.integers(0, 3), tokens=TEXTS, cut=st.integers(0, 5))
    def extend(self, sequence: int, tokens: list[int], cut: int) -> None:
        if sequence not in self.texts:
            return
        tenant, text = self.texts[sequence]
        base = max(0, len(text) - 1 - cut)
        kept = text[: base + 1]
        try:
            slots = self.rows.extend(sequence, base, tokens)
        except OutOfSlotsError:
            self.texts[sequence] = tenant, kept
            return
        assert len(slots) == base + len(tokens)
        text = kept + tokens
        self.texts[sequence] = tenant, text
        for row in range(base, len(slots)):
            self.made[int(slots[row])] = tenant, tuple(text[: row + 2])

    @rule(sequence=st.integers(0, 3), has_tree=st.booleans())
    def share(self, sequence: int, has_tree: bool) -> None:
        if sequence in self.texts:
            self.rows.share(sequence, has_tree=has_tree)

    @rule(sequence=st.integers(0, 3))
    def close(self, sequence: int) -> None:
        self.rows.close(sequence)
        self.texts.pop(sequence, None)

    @rule()
    def forget(self) -> None:
        self.rows.forget()
        assert self.pool.num_idle == 0

    @invariant()
    def every_row_is_the_one_of_its_text(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.rows.check_integrity()
        for sequence, (tenant, text) in self.texts.items():
            assert self.rows.num_held(sequence) == len(text) - 1
            slots = self.rows._held[sequence].table.slots.tolist()
            assert [self.made[slot] for slot in slots] == [(tenant, tuple(text[: i + 2])) for i in range(len(slots))]

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.rows.reset()
            assert self.pool.num_free == self.pool.num_slots


RowsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRowsMachine = RowsMachine.TestCase
