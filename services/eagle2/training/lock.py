"""One training run a work folder: two would overwrite each other's state."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle2.errors import ConfigError

_NAME = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; the lock goes with the process, however that ends.

    Raises ``ConfigError``, naming the holder, where another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _NAME).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(f"{folder} is in use by process {file.read().strip()}; wait or name another.") from None
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
