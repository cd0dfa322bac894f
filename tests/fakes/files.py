"""Files that users bring along."""

from __future__ import annotations

import json
from pathlib import Path


def write_lines(path: Path, *lines: object) -> Path:
    """A ``.jsonl`` file; texts are written as they are, everything else as JSON."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path
