"""A server with tiny random networks, shared by the tests of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.server import Server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a random target and of a random head that fits it."""
    from eagle2.models.tiny import write_tiny_head, write_tiny_target

    folder = tmp_path_factory.mktemp("tiny")
    # Long enough for a stream that outlives the restart of a replica.
    target = write_tiny_target(folder / "target", max_position_embeddings=65536)
    return target, write_tiny_head(folder / "head", target)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: tuple[Path, Path]) -> Iterator[Server]:
    """A running server of the tiny model. Tests leave it as they found it."""
    target, head = tiny_model
    # The tiny target is as fast as its head, so that chosen trees would be none.
    trees = ("--tree-budget", "fixed", "--depth", "2", "--top-k", "8", "--num-draft-tokens", "10")
    flags = ("--target", str(target), "--draft", str(head), "--dtype", "float32", "--threads", "1", *trees)
    with Server(tmp_path_factory.mktemp("server") / "log", *flags) as running:
        running.wait_until_ready()
        yield running
