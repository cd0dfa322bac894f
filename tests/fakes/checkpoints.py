"""The small trained pair of tests/golden as folders that a command line can be pointed at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fakes.verifier import byte_tokenizer_json
from golden_pair import GOLDEN

# The models were trained on bare sentences: a chat is its last message.
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} {% endif %}{% endfor %}"
    "{{ messages[-1].content }}"
)


def write_golden_target(folder: Path, *, template: bool = True) -> Path:
    """Target A with a tokenizer whose ids are bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (GOLDEN / "target_A").iterdir():
        shutil.copyfile(path, folder / path.name)
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    config = {"bos_token": "<s>", "eos_token": "</s>", **({"chat_template": _TEMPLATE} if template else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def golden_head() -> Path:
    return GOLDEN / "head_A"
