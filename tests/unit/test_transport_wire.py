"""The bytes of the pair protocol: values survive, nonsense is refused with a sentence."""

from __future__ import annotations

import contextlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.transport.frames import (
    MAX_BODY_BYTES,
    FrameError,
    FrameKind,
    VersionError,
    decode_header,
    decode_text,
    encode_text,
)
from eagle2.transport.messages import (
    TENANT_BYTES,
    DraftEntry,
    DraftReply,
    DraftStatus,
    DraftStep,
    DraftTree,
    Opening,
)
from eagle2.transport.wire import decode_reply, decode_step, encode_reply, encode_step
from fakes.frames import DTYPES, body_of, entry_of, same_bits, step_of

INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def openings(draw: st.DrawFn) -> Opening:
    tokens = torch.tensor(draw(st.lists(INT64, min_size=1, max_size=5)), dtype=torch.int64)
    return Opening(draw(st.binary(min_size=TENANT_BYTES, max_size=TENANT_BYTES)), tokens)


@st.composite
def steps(draw: st.DrawFn) -> DraftStep:
    dtype = draw(st.sampled_from(DTYPES))
    hidden = draw(st.integers(0, 9))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    entries = []
    for _ in range(draw(st.integers(0, 5))):
        rows = draw(st.integers(0, 4))
        features = torch.randn(rows, hidden, generator=generator).to(dtype)
        tokens = torch.tensor(draw(st.lists(INT64, min_size=rows, max_size=rows)), dtype=torch.int64)
        numbers = draw(INT64), draw(INT64), draw(INT64)
        entries.append(DraftEntry(*numbers, features, tokens, draw(st.booleans()), draw(st.none() | openings())))
    uint32 = st.integers(0, 2**32 - 1)
    uint64 = st.integers(0, 2**64 - 1)
    closed = tuple(draw(st.lists(INT64, max_size=4)))
    return DraftStep(draw(uint64), draw(uint64), draw(uint32), draw(uint32), draw(uint32), tuple(entries), closed)


@st.composite
def replies(draw: st.DrawFn) -> DraftReply:
    trees = []
    for _ in range(draw(st.integers(0, 5))):
        tokens = draw(st.lists(INT64, max_size=5))
        parents = draw(st.lists(INT64, min_size=len(tokens), max_size=len(tokens)))
        scores = draw(st.lists(st.floats(width=32), min_size=len(tokens), max_size=len(tokens)))
        trees.append(
            DraftTree(
                draw(INT64),
                draw(INT64),
                draw(st.sampled_from(DraftStatus)),
                draw(INT64),
                torch.tensor(tokens, dtype=torch.int64),
                torch.tensor(parents, dtype=torch.int64),
                torch.tensor(scores, dtype=torch.float32),
            )
        )
    uint64 = st.integers(0, 2**64 - 1)
    return DraftReply(draw(uint64), draw(uint64), tuple(trees), *(draw(INT64) for _ in range(5)))


@given(steps())
def test_step_round_trip(step: DraftStep) -> None:
    found = decode_step(body_of(encode_step(step), FrameKind.STEP))
    names = ("incarnation", "step", "depth", "top_k", "num_draft_tokens", "closed")
    assert [getattr(found, name) for name in names] == [getattr(step, name) for name in names]
    assert len(found.entries) == len(step.entries)
    for one, other in zip(found.entries, step.entries, strict=True):
        assert (one.sequence, one.cycle, one.base, one.draft) == (other.sequence, other.cycle, other.base, other.draft)
        assert same_bits(one.features, other.features)
        assert same_bits(one.tokens, other.tokens)
        assert (one.opening is None) == (other.opening is None)
        if one.opening is not None and other.opening is not None:
            assert one.opening.tenant == other.opening.tenant
            assert same_bits(one.opening.tokens, other.opening.tokens)


@given(replies())
def test_reply_round_trip(reply: DraftReply) -> None:
    found = decode_reply(body_of(encode_reply(reply), FrameKind.REPLY))
    names = ("incarnation", "step", "received", "finished", "slots_used", "slots_total", "slots_cached")
    assert [getattr(found, name) for name in names] == [getattr(reply, name) for name in names]
    assert len(found.trees) == len(reply.trees)
    for one, other in zip(found.trees, reply.trees, strict=True):
        assert (one.sequence, one.cycle, one.status, one.held) == (
            other.sequence,
            other.cycle,
            other.status,
            other.held,
        )
        assert same_bits(one.tokens, other.tokens)
        assert same_bits(one.parents, other.parents)
        assert same_bits(one.scores, other.scores)


def test_non_contiguous_tokens_and_trees() -> None:
    tokens = torch.arange(10)[::3]
    step = DraftStep(1, 1, 2, 2, 4, (DraftEntry(1, 1, 0, torch.ones(4, 2), tokens),))
    assert decode_step(body_of(encode_step(step), FrameKind.STEP)).entries[0].tokens.tolist() == [0, 3, 6, 9]
    tree = DraftTree(1, 1, DraftStatus.OK, 4, tokens, torch.zeros(8, dtype=torch.int64)[::2], torch.arange(8.0)[::2])
    found = decode_reply(body_of(encode_reply(DraftReply(1, 1, (tree,), 0, 0, 0, 1)), FrameKind.REPLY)).trees[0]
    assert found.tokens.tolist() == [0, 3, 6, 9]
    assert found.scores.tolist() == [0.0, 2.0, 4.0, 6.0]


def opened(opening: Opening) -> DraftEntry:
    return DraftEntry(7, 1, 0, torch.ones(2, 4), torch.arange(2), opening=opening)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (DraftEntry(7, 1, 0, torch.ones(2, 4), torch.arange(3)), r"sequence 7: features of shape \(2, 4\)"),
        (DraftEntry(7, 1, 0, torch.ones(2), torch.arange(2)), r"sequence 7: features of shape \(2,\)"),
        (DraftEntry(7, 1, 0, torch.ones(2, 4).double(), torch.arange(2)), r"features of torch\.float64 are none of"),
        (DraftEntry(7, 1, 0, torch.ones(2, 4), torch.arange(2).int()), r"sequence 7: tokens .* torch\.int32"),
        (DraftEntry(7, 1, 0, torch.ones(2, 4), torch.ones(2, 1).long()), r"sequence 7: tokens of shape \(2, 1\)"),
        (DraftEntry(2**63, 1, 0, torch.ones(2, 4), torch.arange(2)), "9223372036854775808.* does not fit"),
        (opened(Opening(b"t" * 15, torch.arange(1))), "tenant with 15 bytes instead of 16"),
        (opened(Opening(b"t" * 16, torch.arange(0))), r"tokens of an opening are of shape \(0,\)"),
        (opened(Opening(b"t" * 16, torch.arange(2).int())), r"tokens of an opening are .* torch\.int32"),
        (opened(Opening(b"t" * 16, torch.ones(2, 1).long())), r"tokens of an opening are of shape \(2, 1\)"),
    ],
)
def test_steps_that_cannot_be_sent(entry: DraftEntry, sentence: str) -> None:
    with pytest.raises(FrameError, match=sentence):
        encode_step(step_of(entry))


def test_one_step_has_one_kind_of_features() -> None:
    with pytest.raises(FrameError, match=r"sequence 9: .* torch\.float32 instead of \(2, 4\) and torch\.bfloat16"):
        encode_step(step_of(entry_of(torch.ones(2, 4).bfloat16()), entry_of(torch.ones(2, 4), sequence=9)))


def test_a_step_over_the_limit_is_refused_before_it_is_sent() -> None:
    rows = torch.zeros(1, 1).expand(MAX_BODY_BYTES // 4, 1)
    with pytest.raises(FrameError, match="send its rows in chunks"):
        encode_step(step_of(DraftEntry(1, 1, 0, rows, torch.zeros(1, dtype=torch.int64).expand(rows.shape[0]))))


def test_trees_that_cannot_be_sent() -> None:
    tokens, scores = torch.arange(3), torch.zeros(3)
    for tree in (
        DraftTree(5, 1, DraftStatus.OK, 1, tokens, tokens[:2], scores),
        DraftTree(5, 1, DraftStatus.OK, 1, tokens, tokens, scores.double()),
    ):
        with pytest.raises(FrameError, match="sequence 5: tokens, parents and scores"):
            encode_reply(DraftReply(1, 1, (tree,), 0, 0, 0, 0))


def header(magic: bytes = b"EAG2", version: int = 2, kind: int = 5, length: int = 0) -> bytes:
    return struct.pack("<4sHHQ", magic, version, kind, length)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (header(magic=b"HTTP"), "opens with b'HTTP'"),
        (header(version=1), "speaks version 1 .* speaks version 2"),
        (header(kind=99), "kind 99"),
        (header(length=2**63), "announces 9223372036854775808 bytes"),
        (header(length=MAX_BODY_BYTES + 1), f"more than the {MAX_BODY_BYTES} allowed"),
        (header()[:-1], "has 16 bytes, not 15"),
        (b"", "has 16 bytes, not 0"),
    ],
)
def test_bad_headers(data: bytes, sentence: str) -> None:
    with pytest.raises(FrameError, match=sentence):
        decode_header(data)


def test_another_version_is_told_from_nonsense() -> None:
    with pytest.raises(VersionError):
        decode_header(header(version=1))
    with pytest.raises(FrameError) as error:
        decode_header(header(magic=b"HTTP", version=1))
    assert not isinstance(error.value, VersionError)


def test_an_opening_costs_only_the_step_that_has_it() -> None:
    plain, begun = (
        len(body_of(encode_step(step_of(entry)), FrameKind.STEP))
        for entry in (
            DraftEntry(7, 1, 0, torch.ones(2, 4), torch.arange(2)),
            opened(Opening.of("somebody", [3, 4, 5])),
        )
    )
    assert begun - plain == TENANT_BYTES + 8 + 3 * 8


def test_claims_of_an_opening_are_checked() -> None:
    whole = body_of(encode_step(step_of(opened(Opening.of("somebody", [3])))), FrameKind.STEP)
    at = 48 + 32 + TENANT_BYTES
    assert struct.unpack_from("<I", whole, at) == (1,)
    for tokens, sentence in ((0, "of no token"), (2, "announces"), (2**32 - 1, r"openings of 4294967295 tokens")):
        broken = bytearray(whole)
        struct.pack_into("<I", broken, at, tokens)
        with pytest.raises(FrameError, match=sentence):
            decode_step(broken)


def test_tenants_are_told_apart() -> None:
    names = ["org_1", "org_12", "", "anonymous", "org_1\0", "é"]
    digests = {Opening.of(name, [1]).tenant for name in names}
    assert len(digests) == len(names)
    assert {len(digest) for digest in digests} == {TENANT_BYTES}


def test_claims_of_a_body_are_checked_against_its_length() -> None:
    step = body_of(encode_step(step_of(entry_of(torch.ones(3, 4)), closed=(1, 2))), FrameKind.STEP)
    for offset in (28, 32, 36):  # counts of entries and of closed sequences, hidden size
        broken = bytearray(step)
        struct.pack_into("<I", broken, offset, 0xFFFFFFFF)
        with pytest.raises(FrameError, match=r"a step of .* bytes"):
            decode_step(broken)
    broken = bytearray(step)
    broken[40:48] = b"float64\0"
    with pytest.raises(FrameError, match="float64"):
        decode_step(broken)


def test_an_unknown_status_is_refused() -> None:
    none = torch.empty(0, dtype=torch.int64)
    tree = DraftTree(5, 1, DraftStatus.FULL, 1, none, none, torch.empty(0))
    reply = body_of(encode_reply(DraftReply(1, 1, (tree,), 0, 0, 0, 0)), FrameKind.REPLY)
    struct.pack_into("<I", reply, 64 + 24, 77)
    with pytest.raises(FrameError, match="status 77"):
        decode_reply(reply)


@given(steps(), st.data())
def test_a_cut_step_is_refused(step: DraftStep, data: st.DataObject) -> None:
    whole = body_of(encode_step(step), FrameKind.STEP)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(FrameError):
        decode_step(whole[:cut])
    with pytest.raises(FrameError):
        decode_step(whole + b"\0")


@settings(max_examples=300)
@given(
    st.one_of(st.binary(max_size=200).map(bytearray), steps().map(lambda s: body_of(encode_step(s), FrameKind.STEP))),
    st.data(),
)
def test_random_damage_never_escapes_as_another_error(body: bytearray, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(0, 4))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_step, decode_reply, decode_text):
        with contextlib.suppress(FrameError):
            decode(body)


def test_greeting_round_trip() -> None:
    body = body_of(encode_text(FrameKind.HELLO, 2**64 - 1, "llama-3 é 中"), FrameKind.HELLO)
    assert decode_text(body) == (2**64 - 1, "llama-3 é 中")
    with pytest.raises(FrameError, match="no UTF-8"):
        decode_text(body + b"\xff")
