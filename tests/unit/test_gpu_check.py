"""The prepared run for GPU machines, in small and on this CPU; and that it needs nothing that they lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a machine with torch, Triton, numpy, transformers and pytest may be without.
ABSENT = (
    *(
        "ray",
        "numba",
        "llvmlite",
        "fastapi",
        "starlette",
        "pydantic",
        "pydantic_settings",
        "tokenizers",
        "gguf",
        "yaml",
    ),
    *("prometheus_client", "jaxtyping", "beartype", "jinja2", "huggingface_hub", "httpx", "openai", "matplotlib"),
)
IMPORTS = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(name, name=name.partition(".")[0])
sys.meta_path.insert(0, Absent())
import benchmarks.gpu_cycle
"""


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{ROOT / 'services'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }


def test_what_it_imports_is_on_such_a_machine() -> None:
    program = IMPORTS.format(absent=set(ABSENT))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_run_in_small(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", str(tmp_path), "--device", "cpu", "--tiny"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "gpu_check.json").read_text())
    assert (summary["device"], summary["tiny"]) == ("cpu", 1)
    assert {name: part["exit"] for name, part in summary["parts"].items()} == dict.fromkeys(
        ("kernels", "golden", "graphs", "cycle"), 0
    )
    measured = json.loads((tmp_path / "gpu_cycle.json").read_text())
    assert [(row["batch"], row["recorded"]) for row in measured["rows"]] == [
        (1, True),
        (1, False),
        (2, True),
        (2, False),
    ]
    for row in measured["rows"]:
        assert row["c"] == pytest.approx(row["cycle_ms"] / row["plain_ms"])
        assert all(row[f"{phase}_ms"] > 0 for phase in ("draft", "verify", "transfer", "accept"))
    log = (tmp_path / "log.txt").read_text()
    assert "== golden: exit 0" in log
    assert " passed" in log


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", str(tmp_path), "--fast"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "--fast" in done.stderr
