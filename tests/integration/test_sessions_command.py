"""``eagle2 sessions`` on a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from eagle2.cli import main
from eagle2.config import SessionSettings
from eagle2.session.session import session_of
from eagle2.session.store import Owner, SessionEntry
from eagle2.session.stores import create_store
from fakes.redis_server import RedisServer, redis_server


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def _name(i: int) -> str:
    session = session_of("t", session_id=f"CANARY {i}")
    assert session is not None
    return session.name


NAMES = sorted(_name(i) for i in range(5))


@pytest.fixture
def url(server: RedisServer) -> str:
    """A store with five sessions; session i is at replica-i."""

    async def fill() -> None:
        store = create_store(SessionSettings(store=server.url, timeout_s=5.0))
        for i, name in enumerate(NAMES):
            await store.claim(name, Owner(f"replica-{i}", "7"))
        await store.close()

    with server.client() as client:
        client.flushall()
        client.set("{eagle2:1}:session:" + "0" * 64, "nonsense")
    asyncio.run(fill())
    return server.url


def _kept(url: str) -> dict[str, SessionEntry]:
    async def read() -> list[SessionEntry]:
        store = create_store(SessionSettings(store=url, timeout_s=5.0))
        try:
            return await store.sessions()
        finally:
            await store.close()

    return {entry.name: entry for entry in asyncio.run(read())}


def test_list_shows_hashes_and_owners(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "list", "--store", url]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].split() == ["SESSION", "REPLICA", "INCARNATION", "EXPIRES", "IN"]
    assert [line.split()[:3] for line in lines[1:]] == [[name, f"replica-{i}", "7"] for i, name in enumerate(NAMES)]
    assert "CANARY" not in shown


def test_list_as_json_and_with_a_limit(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE2_SESSION__STORE", url)
    assert main(["sessions", "list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["session"], row["replica"], row["incarnation"]) for row in rows] == [
        (name, f"replica-{i}", "7") for i, name in enumerate(NAMES)
    ]
    assert all(0 < row["expires_s"] <= 3600 for row in rows)
    assert main(["sessions", "list", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "more than 2" in lines[-1]


@pytest.mark.parametrize("length", [64, 12])
def test_show_move_and_drop_take_a_beginning_that_no_other_has(
    url: str, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sessions", "--store", url, "show", NAMES[1][:length], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replica"] == "replica-1"

    assert main(["sessions", "--store", url, "move", NAMES[1][:length], "replica-9", "8"]) == 0
    assert _kept(url)[NAMES[1]].owner == Owner("replica-9", "8")

    assert main(["sessions", "drop", NAMES[1][:length], "--store", url]) == 0
    assert set(_kept(url)) == set(NAMES) - {NAMES[1]}
    assert NAMES[1] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "f" * 64], "No session begins with"),
        (["drop", "0" * 63 + "1"], "No session begins with"),
        (["show", "*"], "digits 0-9 and a-f"),
        (["show", ""], "digits 0-9 and a-f"),
        (["list", "--limit", "0"], "--limit must be at least 1"),
        (["move", NAMES[0], "", "1"], "needs a replica"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    url: str, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sessions", "--store", url, *arguments]) == 1
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""
    assert set(_kept(url)) == set(NAMES)


def test_a_beginning_of_several_changes_none(server: RedisServer, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with server.client() as client:
        for last in "ab":
            client.set("{eagle2:1}:session:" + "e" * 63 + last, '["replica-1","1"]', px=60_000)
    assert main(["sessions", "--store", url, "drop", "eee"]) == 1
    assert "More than one" in capsys.readouterr().err
    assert len(_kept(url)) == len(NAMES) + 2


def test_without_a_redis_that_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE2_SESSION__STORE", raising=False)
    assert main(["sessions", "list"]) == 1
    assert "memory://" in capsys.readouterr().err
    assert main(["sessions", "list", "--store", "redis://:CANARY@127.0.0.1:1/0"]) == 1
    said = capsys.readouterr().err
    assert "127.0.0.1:1 cannot be reached" in said
    assert "CANARY" not in said
