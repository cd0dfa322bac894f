"""The small trained pair of tests/golden as folders that a command line can be pointed at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
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


def golden_flags(target: Path) -> list[str]:
    """The pair as a command line names it; ``target``: its folder."""
    return ["--target", str(target), "--draft", str(golden_head()), "--dtype", "float32", "--threads", "1"]


def questions_flags(folder: Path, sentences: Sequence[str]) -> list[str]:
    """A bench of the pair that asks these sentences; its files go into ``folder``."""
    target, asked = write_golden_target(folder / "target"), folder / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": sentence}) + "\n" for sentence in sentences))
    return [*golden_flags(target), "--prompts", str(asked)]
