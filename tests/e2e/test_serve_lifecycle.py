"""How ``eagle2 serve`` starts, refuses and ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly_and_leaves_nothing(number: int, tmp_path: Path, tiny_model: tuple[Path, Path]) -> None:
    target, head = tiny_model
    with Server(tmp_path / "log", "--target", str(target), "--draft", str(head), "--threads", "1") as server:
        server.wait_until_ready()
        folders = {part for pid in server.processes() for part in _cluster_folder(pid)}
        assert len(folders) == 1, f"one cluster, one folder: {folders}"
        assert server.stop(number) == 0, server.log
        assert server.processes() == []
        assert not Path(folders.pop()).exists()
    assert "Ready: " in server.log
    assert "Traceback" not in server.log


def test_a_head_that_does_not_fit_ends_it_with_the_sentence(tmp_path: Path, tiny_model: tuple[Path, Path]) -> None:
    from eagle2.models.tiny import write_tiny_head, write_tiny_target

    other = write_tiny_target(tmp_path / "other", hidden_size=32, num_heads=2, num_kv_heads=1)
    head = write_tiny_head(tmp_path / "head", other)
    with Server(tmp_path / "log", "--target", str(tiny_model[0]), "--draft", str(head), "--threads", "1") as server:
        assert server.process.wait(180) == 1, server.log
        assert server.processes() == []
    sentence = server.log.splitlines()[-1]
    assert "hidden size is 32, the target's is 64" in sentence
    assert "Traceback" not in server.log


def test_a_model_that_is_not_there_is_refused_before_ray_starts(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "--target", str(tmp_path / "nothing")) as server:
        assert server.process.wait(60) == 1
    assert "nothing" in server.log.splitlines()[-1]
    assert "Starting Ray" not in server.log


def _cluster_folder(pid: int) -> list[str]:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return [v.partition("=")[2] for v in variables if v.startswith("EAGLE2_LOCAL_CLUSTER=")]
