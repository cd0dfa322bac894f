"""The socket between a verifier and its proposer when one of them dies, stalls or talks nonsense."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from eagle2.errors import LinkDownError
from eagle2.transport.frames import VERSION, FrameKind, encode_text
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep, DraftTree
from eagle2.transport.node import NodeLink, ProposerBusyError
from eagle2.transport.server import NodeServer
from eagle2.transport.wire import encode_step
from fakes.drafts import OracleHandler
from fakes.pairs import WELCOME, Pair, answered, ended, raw_peer, step_of, until
from fakes.processes import FINGERPRINT, PROPOSER_INCARNATION, running


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as pair:
        yield pair


def test_a_proposer_killed_while_it_is_waited_for(pair: Pair) -> None:
    path = pair.path
    with running("proposer", path) as process:
        link = NodeLink.connect(path, verifier_incarnation=3, fingerprint=FINGERPRINT, timeout_s=10)
        assert link.incarnation == PROPOSER_INCARNATION
        assert answered(link, 1)
        link.send(step_of(2, token=0))
        assert link.receive(0.05) is None
        timer = threading.Timer(0.1, process.kill)
        timer.start()
        started = time.monotonic()
        with pytest.raises(LinkDownError, match="is down"):
            link.receive(60.0)
        assert time.monotonic() - started < 5.0  # noticed, not timed out
        with pytest.raises(LinkDownError):
            link.send(step_of(3))
        with pytest.raises(LinkDownError):
            link.receive(0.0)
        timer.join()
        link.close()
        process.wait()
        with pytest.raises(LinkDownError, match="no proposer listens"):
            NodeLink.connect(path, verifier_incarnation=3, fingerprint=FINGERPRINT, timeout_s=1)
    with running("proposer", path):
        link = NodeLink.connect(path, verifier_incarnation=3, fingerprint=FINGERPRINT, timeout_s=10)
        assert answered(link, 4)
        link.close()


def test_a_killed_verifier_frees_the_lease(pair: Pair) -> None:
    path = pair.path
    handler = OracleHandler(lambda context: [5], incarnation=PROPOSER_INCARNATION)
    server = NodeServer(path, handler, PROPOSER_INCARNATION, fingerprint=FINGERPRINT)
    with running("verifier", path) as process:
        assert server.leased_to == 6
        with pytest.raises(ProposerBusyError):
            NodeLink.connect(path, verifier_incarnation=3, fingerprint=FINGERPRINT, timeout_s=10)
        process.kill()
        process.wait()
        link = NodeLink.connect(path, verifier_incarnation=3, fingerprint=FINGERPRINT, timeout_s=10)
        assert answered(link, 1)
        assert handler.resets == 2
        link.close()
    server.close()


def test_replies_that_came_before_the_end_are_delivered(pair: Pair) -> None:
    server = pair.serve()
    link = pair.connect()
    link.send(step_of(1))
    until(lambda: not link._replies.empty())
    server.close()
    reply = link.receive(1.0)
    assert reply is not None
    assert reply.step == 1
    with pytest.raises(LinkDownError):
        link.receive(10.0)


def test_a_proposer_that_reads_no_more_is_given_up(pair: Pair) -> None:
    pair.impersonate(WELCOME)
    link = pair.connect(stall_s=0.1)
    with pytest.raises(LinkDownError, match=r"took no byte of a frame for 0\.1 s"):
        for number in range(100):
            link.send(step_of(number, rows=1000, hidden=256))
    with pytest.raises(LinkDownError, match="took no byte"):
        link.receive(10.0)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"garbage of more than sixteen bytes", "opens with b'garb'"),
        (b"".join(encode_step(step_of(1))), "kind STEP instead of a reply"),
        (struct.pack("<4sHHQ", b"EAG2", VERSION, 6, 3) + b"abc", "a reply of 3 bytes"),
        (struct.pack("<4sHHQ", b"EAG2", VERSION, 6, 100) + b"abc", "did not send the rest"),
        (struct.pack("<4sHHQ", b"EAG2", VERSION, 6, 2**60), "more than the"),
    ],
    ids=["garbage", "kind", "body", "truncated", "length"],
)
def test_a_proposer_that_talks_nonsense_is_given_up(pair: Pair, data: bytes, sentence: str) -> None:
    pair.impersonate(WELCOME + data)
    link = pair.connect(stall_s=0.1)
    with pytest.raises(LinkDownError, match=sentence):
        link.receive(10.0)


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        struct.pack("<4sHHQ", b"EAG2", VERSION, 5, 2**40),
        struct.pack("<4sHHQ", b"EAG2", VERSION, 5, 48) + b"\xff" * 48,
        b"".join(encode_text(FrameKind.BUSY, 1, "")),
    ],
    ids=["http", "length", "counts", "kind"],
)
def test_a_verifier_that_talks_nonsense_is_sent_away(pair: Pair, data: bytes, greeted: bool) -> None:
    server = pair.serve()
    hello = b"".join(encode_text(FrameKind.HELLO, 1, "llama")) if greeted else b""
    peer = raw_peer(server.path, hello, data)
    if greeted:
        assert peer.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME
    assert ended(peer)
    assert server.counts()["bad_frames"] == 1
    assert answered(pair.connect(), 1)


def test_a_verifier_of_another_version_learns_which_one_is_spoken(pair: Pair) -> None:
    """The answer is a frame of this version, which the other one names when it refuses it."""
    server = pair.serve()
    peer = raw_peer(server.path, struct.pack("<4sHHQ", b"EAG2", VERSION + 5, 1, 3) + b"abc")
    magic, version, _, _ = struct.unpack("<4sHHQ", peer.recv(16, socket.MSG_WAITALL))
    assert (magic, version) == (b"EAG2", VERSION)
    until(lambda: server.counts()["bad_frames"] == 1)
    assert server.leased_to is None
    peer.close()
    assert answered(pair.connect(), 1)


def test_verifiers_that_stall_or_leave_in_a_frame(pair: Pair) -> None:
    server = pair.serve(stall_s=0.1)
    silent = raw_peer(server.path)
    half = raw_peer(server.path, b"".join(encode_text(FrameKind.HELLO, 1, "llama"))[:20])
    assert ended(silent)
    assert ended(half)
    left = raw_peer(
        server.path, b"".join(encode_text(FrameKind.HELLO, 1, "llama")), b"".join(encode_step(step_of(1)))[:90]
    )
    left.close()
    assert answered(pair.connect(), 2)


def test_large_steps_and_replies_cross_without_a_deadlock(pair: Pair) -> None:
    nodes = 200_000  # 4 MB of reply, far over any socket buffer
    tree = (torch.arange(nodes), torch.zeros(nodes, dtype=torch.int64), torch.zeros(nodes))

    class Large:
        def handle(self, step: DraftStep) -> DraftReply:
            entry = step.entries[0]
            answer = DraftTree(entry.sequence, entry.cycle, DraftStatus.OK, int(entry.features.sum()), *tree)
            return DraftReply(9, step.step, (answer,), 0, 0, 0, 0)

        def reset(self) -> None:
            pass

    pair.serve(Large(), stall_s=30.0)
    link = pair.connect(stall_s=30.0)
    for number in range(5):
        features = torch.zeros(1000, 1024)
        features[-1, -1] = number
        link.send(DraftStep(3, number, 2, 2, 4, (DraftEntry(1, 1, 0, features, torch.zeros(1000).long()),)))
    for number in range(5):
        reply = link.receive(30.0)
        assert reply is not None
        assert (reply.step, reply.trees[0].held) == (number, number)
        assert torch.equal(reply.trees[0].tokens, tree[0])
