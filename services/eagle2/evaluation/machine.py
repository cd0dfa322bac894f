"""Where and with what something was measured."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("eagle2", "torch", "transformers", "numba")


@dataclass(frozen=True, slots=True)
class Conditions:
    """The circumstances of a measurement. ``threads`` is how many every system computes with, ``load`` the
    machine's one-minute load average before the start."""

    command: str
    date: str
    commit: str
    cpu: str
    cores: int
    threads: int
    load: float
    versions: dict[str, str]

    @classmethod
    def now(cls, load: float) -> Conditions:
        """``load`` is from before the model was loaded, which takes all cores. Threads are those of this thread."""
        return cls(
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            commit=_commit(Path(__file__).parent),
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            load=load,
            versions={"python": platform.python_version(), **_versions()},
        )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    """The processor's name; on a GPU machine the GPU's too."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name} with {torch.cuda.get_device_name()}" if torch.cuda.is_available() else name


def _commit(folder: Path) -> str:
    """The checkout's commit, with a mark where the package differs from it; 'unknown' outside a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # An installed package may lie inside somebody else's repository.
        if not (Path(git("rev-parse", "--show-toplevel")) / "services" / "eagle2").is_dir():
            return "unknown"
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(folder.parent))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with local changes" if changed else commit
