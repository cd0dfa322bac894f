"""The socket between a verifier and its proposer: its file, the greeting, the lease."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle2.errors import ConfigError, LinkDownError, ModelError
from eagle2.transport.node import NodeLink, ProposerBusyError
from eagle2.transport.server import NodeServer
from eagle2.transport.wire import encode_step
from fakes.drafts import OracleHandler
from fakes.pairs import WELCOME, Pair, answered, step_of


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as pair:
        yield pair


# The socket file


def test_only_this_user_may_open_the_socket(pair: Pair) -> None:
    assert stat.S_IMODE(Path(pair.serve().path).stat().st_mode) == 0o600


def test_the_socket_file_goes_with_the_server(pair: Pair) -> None:
    server = pair.serve()
    before = server.alive
    server.close()
    server.close()
    assert (before, server.alive) == (True, False)
    assert not Path(server.path).exists()


def test_a_path_too_long_is_named(pair: Pair) -> None:
    path = pair.folder / ("x" * 100)
    for attempt in (
        lambda: NodeServer(path, OracleHandler(list), 9, fingerprint="llama"),
        lambda: NodeLink.connect(path, verifier_incarnation=1, fingerprint="llama", timeout_s=1),
    ):
        with pytest.raises(ConfigError, match=rf"xxx has {len(str(path))} bytes; a Unix socket takes 103 at most"):
            attempt()


def test_a_dead_socket_file_is_replaced(pair: Pair) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(pair.path))
        dead.listen()
    pair.serve()
    assert answered(pair.connect(), 1)


def test_a_living_socket_and_a_plain_file_are_left_alone(pair: Pair) -> None:
    pair.serve()
    with pytest.raises(ConfigError, match="another process listens"):
        pair.serve()
    assert answered(pair.connect(), 1)
    plain = pair.folder / "plain"
    plain.write_text("kept")
    with pytest.raises(ConfigError, match="is no socket"):
        NodeServer(plain, OracleHandler(list), 9, fingerprint="llama")
    assert plain.read_text() == "kept"


# The greeting and the lease


def test_both_sides_learn_the_incarnation_of_the_other(pair: Pair) -> None:
    server = pair.serve()
    assert server.leased_to is None
    assert pair.connect(incarnation=2**64 - 1).incarnation == 9
    assert server.leased_to == 2**64 - 1


def test_one_verifier_at_a_time(pair: Pair) -> None:
    handler = OracleHandler(lambda context: [context[-1] + 1], incarnation=9)
    server = pair.serve(handler)
    first = pair.connect(incarnation=0xABC)
    with pytest.raises(ProposerBusyError, match="is leased to the verifier abc"):
        pair.connect(incarnation=4)
    assert answered(first, 1)
    assert handler.resets == 1
    first.close()
    second = pair.connect(incarnation=4)
    assert answered(second, 2)
    assert (handler.resets, handler.held(1)) == (2, 1)
    assert server.leased_to == 4
    assert server.counts() == {"leases": 2, "busy": 1, "mismatches": 0, "bad_frames": 0, "handler_errors": 0}


def test_a_silent_holder_keeps_the_lease(pair: Pair) -> None:
    pair.serve(stall_s=0.05)
    first = pair.connect()
    assert first.receive(0.3) is None  # several read deadlines of the server
    with pytest.raises(ProposerBusyError):
        pair.connect()
    assert answered(first, 1)


def test_a_lease_whose_holder_left_in_mid_step_is_waited_for(pair: Pair) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def continuation(context: list[int]) -> list[int]:
        entered.set()
        assert go_on.wait(10)
        return [1]

    pair.serve(OracleHandler(continuation, incarnation=9), stall_s=10.0)
    first = pair.connect()
    first.send(step_of(1))
    first.send(step_of(2))  # still unread when the first one leaves
    assert entered.wait(10)
    first.close()
    timer = threading.Timer(0.1, go_on.set)
    timer.start()
    assert answered(pair.connect(incarnation=8), 3)
    timer.join()


def test_another_model_is_refused_and_takes_no_lease(pair: Pair) -> None:
    server = pair.serve()
    with pytest.raises(ModelError, match="drafts for the model 'llama', this verifier runs 'qwen'"):
        pair.connect(fingerprint="qwen")
    assert server.counts()["mismatches"] == 1
    assert answered(pair.connect(), 1)


def test_nobody_listens(pair: Pair) -> None:
    with pytest.raises(LinkDownError, match=r"no proposer listens at .*p\.sock"):
        pair.connect()


def test_a_proposer_that_never_answers_the_greeting(pair: Pair) -> None:
    pair.impersonate(b"")
    with pytest.raises(LinkDownError, match=r"did not answer the greeting: .* in time"):
        pair.connect(timeout_s=0.1)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "opens with b'HTTP'"),
        (WELCOME[:4] + b"\x09\x00" + WELCOME[6:], "speaks version 9"),
        (b"".join(encode_step(step_of(1))), "kind STEP"),
    ],
)
def test_a_strange_answer_to_the_greeting(pair: Pair, answer: bytes, sentence: str) -> None:
    pair.impersonate(answer)
    with pytest.raises(LinkDownError, match=sentence):
        pair.connect()
