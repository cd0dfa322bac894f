"""The socket between a verifier and its proposer: lease, greeting, death, and peers that talk nonsense."""

from __future__ import annotations

import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from eagle2.errors import ConfigError, LinkDownError, ModelError
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep, DraftTree
from eagle2.transport.node import NodeLink, ProposerBusyError
from eagle2.transport.server import NodeServer
from eagle2.transport.wire import FrameKind, encode_step, encode_text
from fakes.drafts import OracleHandler
from fakes.processes import FINGERPRINT, PROPOSER_INCARNATION, running

Serve = Callable[..., NodeServer]
Connect = Callable[..., NodeLink]


@pytest.fixture
def folder() -> Iterator[Path]:
    # pytest's own temporary paths are longer than a socket address
    with tempfile.TemporaryDirectory(prefix="e2") as name:
        yield Path(name)


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    servers: list[NodeServer] = []

    def start(handler: object = None, **options: object) -> NodeServer:
        handler = handler or OracleHandler(lambda context: [context[-1] + 1], incarnation=9)
        server = NodeServer(folder / "p.sock", handler, 9, fingerprint="llama", **options)  # type: ignore[arg-type]
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def connect(folder: Path) -> Iterator[Connect]:
    links: list[NodeLink] = []

    def start(incarnation: int = 3, **options: object) -> NodeLink:
        settings = {"fingerprint": "llama", "timeout_s": 10.0, **options}
        link = NodeLink.connect(folder / "p.sock", verifier_incarnation=incarnation, **settings)  # type: ignore[arg-type]
        links.append(link)
        return link

    yield start
    for link in links:
        link.close()


def step_of(number: int, token: int = 4, rows: int = 1, hidden: int = 8) -> DraftStep:
    tokens = torch.full((rows,), token)
    return DraftStep(3, number, 2, 2, 4, (DraftEntry(1, number, 0, torch.zeros(rows, hidden), tokens),))


def answered(link: NodeLink, number: int) -> bool:
    link.send(step_of(number))
    reply = link.receive(10.0)
    return reply is not None and reply.step == number


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def raw_peer(path: str | Path, *data: bytes) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(10)
    peer.connect(str(path))
    for part in data:
        peer.sendall(part)
    return peer


def ended(peer: socket.socket) -> bool:
    """Whether the other side closes without another word. A reset is an end with something left unread."""
    with peer:
        try:
            return peer.recv(1) == b""
        except ConnectionResetError:
            return True


class _Impostor:
    """Listens like a proposer, reads the greeting, answers with given bytes and then does nothing."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._answer = answer
        self._peers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._thread.join()
        for one in (self._listener, *self._peers):
            one.close()

    def _run(self) -> None:
        peer, _ = self._listener.accept()
        peer.recv(1024)
        peer.sendall(self._answer)
        self._peers.append(peer)


WELCOME = b"".join(encode_text(FrameKind.WELCOME, 9, "llama"))


# The socket file


def test_only_this_user_may_open_the_socket(serve: Serve) -> None:
    assert stat.S_IMODE(Path(serve().path).stat().st_mode) == 0o600


def test_the_socket_file_goes_with_the_server(serve: Serve) -> None:
    server = serve()
    assert server.alive
    server.close()
    server.close()
    assert not server.alive
    assert not Path(server.path).exists()


def test_a_path_too_long_is_named(folder: Path) -> None:
    path = folder / ("x" * 100)
    for attempt in (
        lambda: NodeServer(path, OracleHandler(list), 9, fingerprint="llama"),
        lambda: NodeLink.connect(path, verifier_incarnation=1, fingerprint="llama", timeout_s=1),
    ):
        with pytest.raises(ConfigError, match=rf"xxx has {len(str(path))} bytes; a Unix socket takes 103 at most"):
            attempt()


def test_a_dead_socket_file_is_replaced(folder: Path, serve: Serve, connect: Connect) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(folder / "p.sock"))
        dead.listen()
    serve()
    assert answered(connect(), 1)


def test_a_living_socket_and_a_plain_file_are_left_alone(folder: Path, serve: Serve, connect: Connect) -> None:
    serve()
    with pytest.raises(ConfigError, match="another process listens"):
        serve()
    assert answered(connect(), 1)
    plain = folder / "plain"
    plain.write_text("kept")
    with pytest.raises(ConfigError, match="is no socket"):
        NodeServer(plain, OracleHandler(list), 9, fingerprint="llama")
    assert plain.read_text() == "kept"


# The greeting and the lease


def test_both_sides_learn_the_incarnation_of_the_other(serve: Serve, connect: Connect) -> None:
    server = serve()
    assert server.leased_to is None
    assert connect(incarnation=2**64 - 1).incarnation == 9
    assert server.leased_to == 2**64 - 1


def test_one_verifier_at_a_time(serve: Serve, connect: Connect) -> None:
    handler = OracleHandler(lambda context: [context[-1] + 1], incarnation=9)
    server = serve(handler)
    first = connect(incarnation=0xABC)
    with pytest.raises(ProposerBusyError, match="is leased to the verifier abc"):
        connect(incarnation=4)
    assert answered(first, 1)
    assert handler.resets == 1
    first.close()
    second = connect(incarnation=4)
    assert answered(second, 2)
    assert (handler.resets, handler.held(1)) == (2, 1)
    assert server.leased_to == 4
    assert server.counts() == {"leases": 2, "busy": 1, "mismatches": 0, "bad_frames": 0, "handler_errors": 0}


def test_a_silent_holder_keeps_the_lease(serve: Serve, connect: Connect) -> None:
    serve(stall_s=0.05)
    first = connect()
    assert first.receive(0.3) is None  # several read deadlines of the server
    with pytest.raises(ProposerBusyError):
        connect()
    assert answered(first, 1)


def test_a_lease_whose_holder_left_in_mid_step_is_waited_for(serve: Serve, connect: Connect) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def continuation(context: list[int]) -> list[int]:
        entered.set()
        assert go_on.wait(10)
        return [1]

    serve(OracleHandler(continuation, incarnation=9), stall_s=10.0)
    first = connect()
    first.send(step_of(1))
    first.send(step_of(2))  # still unread when the first one leaves
    assert entered.wait(10)
    first.close()
    timer = threading.Timer(0.1, go_on.set)
    timer.start()
    assert answered(connect(incarnation=8), 3)
    timer.join()


def test_another_model_is_refused_and_takes_no_lease(serve: Serve, connect: Connect) -> None:
    server = serve()
    with pytest.raises(ModelError, match="drafts for the model 'llama', this verifier runs 'qwen'"):
        connect(fingerprint="qwen")
    assert server.counts()["mismatches"] == 1
    assert answered(connect(), 1)


def test_nobody_listens(folder: Path, connect: Connect) -> None:
    with pytest.raises(LinkDownError, match=r"no proposer listens at .*p\.sock"):
        connect()


def test_a_proposer_that_never_answers_the_greeting(folder: Path, connect: Connect) -> None:
    impostor = _Impostor(folder / "p.sock", b"")
    with pytest.raises(LinkDownError, match=r"did not answer the greeting: .* in time"):
        connect(timeout_s=0.1)
    impostor.close()


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "opens with b'HTTP'"),
        (WELCOME[:4] + b"\x09\x00" + WELCOME[6:], "speaks version 9"),
        (b"".join(encode_step(step_of(1))), "kind STEP"),
    ],
)
def test_a_strange_answer_to_the_greeting(folder: Path, connect: Connect, answer: bytes, sentence: str) -> None:
    impostor = _Impostor(folder / "p.sock", answer)
    with pytest.raises(LinkDownError, match=sentence):
        connect()
    impostor.close()


# Death and stalls


def test_a_proposer_killed_while_it_is_waited_for(folder: Path) -> None:
    path = folder / "p.sock"
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
        with pytest.raises(LinkDownError, match="no proposer listens"):
            NodeLink.connect(path, verifier_incarnation=3, fingerprint=FINGERPRINT, timeout_s=1)
    with running("proposer", path):
        link = NodeLink.connect(path, verifier_incarnation=3, fingerprint=FINGERPRINT, timeout_s=10)
        assert answered(link, 4)
        link.close()


def test_a_killed_verifier_frees_the_lease(folder: Path) -> None:
    path = folder / "p.sock"
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


def test_replies_that_came_before_the_end_are_delivered(serve: Serve, connect: Connect) -> None:
    server = serve()
    link = connect()
    link.send(step_of(1))
    until(lambda: not link._replies.empty())
    server.close()
    reply = link.receive(1.0)
    assert reply is not None
    assert reply.step == 1
    with pytest.raises(LinkDownError):
        link.receive(10.0)


def test_a_proposer_that_reads_no_more_is_given_up(folder: Path, connect: Connect) -> None:
    impostor = _Impostor(folder / "p.sock", WELCOME)
    link = connect(stall_s=0.1)
    with pytest.raises(LinkDownError, match=r"took no byte of a frame for 0\.1 s"):
        for number in range(100):
            link.send(step_of(number, rows=1000, hidden=256))
    with pytest.raises(LinkDownError, match="took no byte"):
        link.receive(10.0)
    impostor.close()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"garbage of more than sixteen bytes", "opens with b'garb'"),
        (b"".join(encode_step(step_of(1))), "kind STEP instead of a reply"),
        (struct.pack("<4sHHQ", b"EAG2", 1, 6, 3) + b"abc", "a reply of 3 bytes"),
        (struct.pack("<4sHHQ", b"EAG2", 1, 6, 100) + b"abc", "did not send the rest"),
        (struct.pack("<4sHHQ", b"EAG2", 1, 6, 2**60), "more than the"),
    ],
)
def test_a_proposer_that_talks_nonsense_is_given_up(folder: Path, connect: Connect, data: bytes, sentence: str) -> None:
    impostor = _Impostor(folder / "p.sock", WELCOME + data)
    link = connect(stall_s=0.1)
    with pytest.raises(LinkDownError, match=sentence):
        link.receive(10.0)
    impostor.close()


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        struct.pack("<4sHHQ", b"EAG2", 7, 1, 0),
        struct.pack("<4sHHQ", b"EAG2", 1, 5, 2**40),
        struct.pack("<4sHHQ", b"EAG2", 1, 5, 48) + b"\xff" * 48,
        b"".join(encode_text(FrameKind.BUSY, 1, "")),
    ],
    ids=["http", "version", "length", "counts", "kind"],
)
def test_a_verifier_that_talks_nonsense_is_sent_away(
    serve: Serve, connect: Connect, data: bytes, greeted: bool
) -> None:
    server = serve()
    hello = b"".join(encode_text(FrameKind.HELLO, 1, "llama")) if greeted else b""
    peer = raw_peer(server.path, hello, data)
    if greeted:
        assert peer.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME
    assert ended(peer)
    assert server.counts()["bad_frames"] == 1
    assert answered(connect(), 1)


def test_verifiers_that_stall_or_leave_in_a_frame(serve: Serve, connect: Connect) -> None:
    server = serve(stall_s=0.1)
    silent = raw_peer(server.path)
    half = raw_peer(server.path, b"".join(encode_text(FrameKind.HELLO, 1, "llama"))[:20])
    assert ended(silent)
    assert ended(half)
    left = raw_peer(
        server.path, b"".join(encode_text(FrameKind.HELLO, 1, "llama")), b"".join(encode_step(step_of(1)))[:90]
    )
    left.close()
    assert answered(connect(), 2)


def test_large_steps_and_replies_cross_without_a_deadlock(serve: Serve, connect: Connect) -> None:
    nodes = 200_000  # 4 MB of reply, far over any socket buffer
    tree = (torch.arange(nodes), torch.zeros(nodes, dtype=torch.int64), torch.zeros(nodes))

    class Large:
        def handle(self, step: DraftStep) -> DraftReply:
            entry = step.entries[0]
            answer = DraftTree(entry.sequence, entry.cycle, DraftStatus.OK, int(entry.features.sum()), *tree)
            return DraftReply(9, step.step, (answer,), 0, 0, 0, 0)

        def reset(self) -> None:
            pass

    serve(Large(), stall_s=30.0)
    link = connect(stall_s=30.0)
    for number in range(5):
        features = torch.zeros(1000, 1024)
        features[-1, -1] = number
        link.send(DraftStep(3, number, 2, 2, 4, (DraftEntry(1, 1, 0, features, torch.zeros(1000).long()),)))
    for number in range(5):
        reply = link.receive(30.0)
        assert reply is not None
        assert (reply.step, reply.trees[0].held) == (number, number)
        assert torch.equal(reply.trees[0].tokens, tree[0])
