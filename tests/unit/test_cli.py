"""The command line: lazy commands, flags that become settings, refusals as one sentence."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from eagle2 import __version__
from eagle2.cli import main
from eagle2.operations.settings_flags import add_engine_flags, add_model_flags, given_settings


def _settings(*flags: str) -> dict[str, dict[str, object]]:
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    add_engine_flags(parser)
    return given_settings(parser.parse_args(flags))


def test_only_given_flags_become_settings() -> None:
    assert _settings() == {}
    assert _settings("--top-k", "3", "--dtype", "float32") == {"model": {"dtype": "float32"}, "engine": {"top_k": 3}}


def test_the_vocabulary_of_drafts_is_a_flag() -> None:
    assert _settings("--draft-vocabulary", "4096") == {"model": {"draft_vocabulary": "4096"}}


def test_no_draft_is_spelt_none() -> None:
    assert _settings("--draft", "none") == {"model": {"draft": None}}


@pytest.mark.parametrize("command", ["serve", "generate", "train", "bench", "keys", "sessions"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"eagle2 {command}" in capsys.readouterr().out


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serv"])
    assert "serv" in capsys.readouterr().err


def test_the_command_line_itself_loads_neither_torch_nor_ray() -> None:
    code = "import sys, eagle2.cli, eagle2.operations.serve_command; print(sorted({'torch', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"eagle2 {__version__}"


def test_the_application_builds_without_torch() -> None:
    """Serve builds it in a task of its own and unpickles the router by its import path."""
    code = (
        "import sys, eagle2.app; app = eagle2.app.build({'engine': {'depth': 2}}); "
        "from ray import cloudpickle; from eagle2.router.deployment import router; "
        "cloudpickle.loads(cloudpickle.dumps(router)); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
