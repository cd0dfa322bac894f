"""API keys: what a file may say, who is found, and what happens when the file changes."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle2.cli import main
from eagle2.config import TenantSettings, load_settings
from eagle2.errors import ConfigError
from eagle2.router import tenants
from eagle2.router.tenants import Caller, KeyFile, key_line, new_key, parse_keys
from eagle2.session.hashing import framed_hash

GUIDE = Path(__file__).parents[2] / "docs/guides/api-keys.md"
HASH = hashlib.sha256(b"k").hexdigest()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def key_file(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


async def find(keys: KeyFile, key: str) -> Caller | None:
    return await keys.caller(f"Bearer {key}")


async def test_keys_of_one_tenant_share_it_and_no_one_else_does(tmp_path: Path) -> None:
    lines = [key_line("acme", "one"), key_line("acme", "two"), key_line("globex", "three")]
    keys = KeyFile(key_file(tmp_path, "\n".join(lines)))
    one, two, three = [await find(keys, key) for key in ("one", "two", "three")]
    assert one is not None
    assert two is not None
    assert three is not None
    assert one.tenant == two.tenant != three.tenant
    assert len({one.key, two.key, three.key}) == 3
    assert await keys.caller("bearer  three ") == three
    for other in (None, "", "one", "Bearer", "Bearer ", "Basic one", "Bearer on", "Bearer one two", "Bearer \xff"):
        assert await keys.caller(other) is None


@given(st.lists(st.text(max_size=8), max_size=4), st.lists(st.text(max_size=8), max_size=4))
def test_hashes_of_names_frame_their_parts(one: list[str], other: list[str]) -> None:
    """B39: no two lists of parts meet, such as ("org_1", "2345") and ("org_12345", "")."""
    assert (framed_hash(*one) == framed_hash(*other)) == (one == other)
    assert framed_hash("org_1", "2345") != framed_hash("org_12345", "")


async def test_every_entry_is_compared_whichever_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"k{index}" for index in range(5)]
    keys = KeyFile(key_file(tmp_path, "\n".join(key_line("acme", name) for name in names)))
    compared = []
    real = tenants.hmac.compare_digest
    monkeypatch.setattr(tenants.hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    for key in ("k0", "k4", "none of them"):
        compared.clear()
        await find(keys, key)
        assert len(compared) == 5


def test_limits_of_a_line_go_before_those_of_all() -> None:
    text = f"# who\n\na {HASH.upper()} tokens_per_minute=7\nb sha256:{'0' * 64}\n"
    a, b = (entry.caller for entry in parse_keys(text, 5, 50))
    assert (a.requests_per_minute, a.tokens_per_minute) == (5, 7)
    assert (b.requests_per_minute, b.tokens_per_minute) == (5, 50)


@pytest.mark.parametrize(
    "line",
    [
        "acme",
        "acme sk-CANARY",
        f"acme sha256:{HASH[1:]}",
        f"acme md5:{HASH}",
        f"CANARY/acme {HASH}",
        f"{'a' * 129} {HASH}",
        f"acme {HASH} CANARY",
        f"acme {HASH} burst=3",
        f"acme {HASH} requests_per_minute=0",
        f"acme {HASH} requests_per_minute=-1",
        f"acme {HASH} requests_per_minute=1.5",
        f"acme {HASH} tokens_per_minute=",
        f"acme {HASH} tokens_per_minute={'9' * 400}",
    ],
)
def test_a_bad_line_is_named_and_not_quoted(line: str) -> None:
    with pytest.raises(ConfigError, match=r"^line 3: ") as caught:
        parse_keys(f"# first\n\n{line}\n")
    assert "CANARY" not in str(caught.value)


def test_a_key_stands_once() -> None:
    with pytest.raises(ConfigError, match="line 2: the same key"):
        parse_keys(f"acme {HASH}\nglobex {HASH}")


@pytest.mark.parametrize("raw", [b"", b"\n\n", b"# acme\n", b"\xff\xfe", b"#" * 1_100_000])
def test_a_file_without_keys_refuses_to_start(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=f"^The key file {path} cannot be used: .*[.]$"):
        KeyFile(path)


def test_a_file_that_cannot_be_read_refuses_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeyFile(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        KeyFile(tmp_path)


async def test_a_mounted_secret_is_swapped_under_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Kubernetes does it: the file is a link into ``..data``, which is a link to a folder and is replaced whole."""
    caplog.set_level(logging.DEBUG)
    mount, clock = tmp_path / "mount", Clock()
    mount.mkdir()

    def publish(version: str, text: str) -> None:
        (mount / version).mkdir()
        (mount / version / "keys").write_text(text)
        (mount / "..new").symlink_to(version)
        (mount / "..new").replace(mount / "..data")

    publish("..1", key_line("acme", "old"))
    (mount / "keys").symlink_to("..data/keys")
    keys = KeyFile(mount / "keys", clock=clock)
    publish("..2", key_line("acme", "new"))
    assert await find(keys, "old"), "it is looked at once a second"
    clock.now += 1
    assert await find(keys, "old") is None
    assert await find(keys, "new")

    for version, text in (("..3", ""), ("..4", "acme CANARY")):
        publish(version, text)
        for _ in range(3):
            clock.now += 1
            assert await find(keys, "new"), "the last good one goes on"
    (mount / "keys").unlink()
    for _ in range(3):
        clock.now += 1
        assert await find(keys, "new")
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 3, "each bad version is told once"
    assert all(str(mount / "keys") in error and "CANARY" not in error for error in errors)

    publish("..5", key_line("acme", "newest"))
    (mount / "keys").symlink_to("..data/keys")
    clock.now += 1
    assert await find(keys, "newest")
    assert await find(keys, "new") is None


def test_settings_of_tenants() -> None:
    assert KeyFile.of(TenantSettings()) is None
    with pytest.raises(ConfigError, match="absolute path, not 'keys'"):
        load_settings({"tenants": {"keys_file": "keys"}})
    for name in ("requests_per_minute", "tokens_per_minute"):
        with pytest.raises(ConfigError, match=f"{name} counts by key, so it needs a keys_file"):
            load_settings({"tenants": {name: 3}})


async def test_the_settings_limits_reach_the_keys(tmp_path: Path) -> None:
    path = key_file(tmp_path, key_line("acme", "k"))
    keys = KeyFile.of(TenantSettings(str(path), requests_per_minute=3, tokens_per_minute=4))
    assert keys is not None
    caller = await find(keys, "k")
    assert caller is not None
    assert (caller.requests_per_minute, caller.tokens_per_minute) == (3, 4)


async def test_the_command_makes_a_key_that_its_line_lets_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "acme"]) == 0
    printed = capsys.readouterr()
    key = printed.err.split()[-1]
    assert key not in printed.out
    path = key_file(tmp_path, printed.out)
    assert await find(KeyFile(path), key)
    assert main(["keys", "check", str(path)]) == 0
    assert capsys.readouterr().out == "keys: 1, tenants: 1\n"
    assert main(["keys", "new", "a b"]) == 1
    assert new_key() != new_key()


def test_the_guides_example_can_be_used() -> None:
    block = GUIDE.read_text().split("are skipped:\n\n")[1].split("\n\n")[0]
    callers = [entry.caller for entry in parse_keys(block)]
    assert len(callers) == 3
    assert len({caller.tenant for caller in callers}) == 2
    assert (callers[0].requests_per_minute, callers[0].tokens_per_minute) == (60, 100_000)
