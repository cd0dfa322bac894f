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
    """The circumstances of a measurement. ``load`` is the machine's one-minute load average at the start."""

    command: str
    date: str
    commit: str
    cpu: str
    cores: int
    threads: int
    load: float
    versions: dict[str, str]

    @classmethod
    def now(cls, threads: int) -> Conditions:
        """``threads``: CPU threads that every system computes with."""
        return cls(
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            commit=_commit(Path(__file__).parent),
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            threads=threads,
            load=os.getloadavg()[0],
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
    """The checkout's commit, with a mark where files differ from it; 'unknown' outside a checkout."""
    try:
        git = ["git", "-C", str(folder)]
        top = Path(
            subprocess.check_output(
                [*git, "rev-parse", "--show-toplevel"], text=True, stderr=subprocess.DEVNULL
            ).strip()
        )
        # An installed package may lie inside somebody else's repository.
        if not (top / "services" / "eagle2").is_dir():
            return "unknown"
        commit = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()
        changed = subprocess.check_output(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", str(folder.parent)]
        )
        return f"{commit} with local changes" if changed else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
