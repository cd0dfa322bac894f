"""The programs that are compared: where each lies, and how it is started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.workers import Worker
from eagle2.errors import ConfigError
from eagle2.models.embedded import EMBEDDED, embedded_gguf
from eagle2.models.loader import resolve_target

OFF, FIXED, ADAPTIVE = "eagle2, plain", "eagle2, tree {}", "eagle2, adaptive"
TRANSFORMERS, LLAMA_CPP, VLLM = "transformers", "llama.cpp", "vLLM (CPU)"
PEERS = ("transformers", "llama.cpp", "vllm")

_CONTEXT = 2048  # tokens; the prompts are short
# A peer sees its own packages alone, whatever this process was started with.
_ISOLATED = {"PYTHONPATH": ""}


@dataclass(frozen=True, slots=True)
class Places:
    """Where peers' environments lie (``benchmarks.peers.build``), and what all of them share."""

    folder: Path
    threads: int

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's environment. Raises ``ConfigError`` where it was not built."""
        path = self.folder / peer / "bin" / "python"
        if not path.is_file():
            raise ConfigError(
                f"{peer} is not there: `python -m benchmarks.peers build {peer}` makes {path.parent.parent}."
            )
        return path

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


def start_ours(places: Places, shape: str, kind: str) -> Worker:
    """This engine: ``off``, ``fixed`` or ``adaptive``."""
    name = {"off": OFF, "fixed": FIXED.format(shape), "adaptive": ADAPTIVE}[kind]
    arguments = [kind, shape, str(places.threads)]
    log = places.log(f"eagle2-{kind}-{shape.replace('/', '-')}")
    return Worker(name, Path(sys.executable), "eagle2_adapter.py", arguments, {}, log)


def start_peer(places: Places, peer: str) -> Worker:
    """One of ``PEERS``. Raises ``ConfigError`` where its environment was not built."""
    threads = str(places.threads)
    if peer == "transformers":
        # It is a dependency of the comparison in `eagle2 bench` too: the project's environment has it.
        arguments = [str(resolve_target(EMBEDDED)), threads]
        return Worker(TRANSFORMERS, Path(sys.executable), "transformers_adapter.py", arguments, {}, places.log(peer))
    python = places.python(peer)
    if peer == "llama.cpp":
        target = places.folder / f"{embedded_gguf().stem.partition('.')[0]}.BF16.gguf"
        arguments = [str(embedded_gguf()), str(target), threads]
        return Worker(LLAMA_CPP, python, "llama_cpp_adapter.py", arguments, _ISOLATED, places.log(peer))
    assert peer == "vllm", f"{peer} is no peer"
    cores = sorted(os.sched_getaffinity(0))[: places.threads]
    environ = {
        **_ISOLATED,
        # By default it leaves a core idle.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "LD_PRELOAD": str(places.folder / peer / "lib" / "libiomp5.so"),
        "OMP_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
    }
    arguments = [str(resolve_target(EMBEDDED)), str(_CONTEXT)]
    return Worker(VLLM, python, "vllm_adapter.py", arguments, environ, places.log(peer))
