"""From what a user names a model to a prepared checkpoint folder."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle2.errors import ModelError
from eagle2.models import gguf
from eagle2.models.draft_vocabulary import TABLE_NAME
from eagle2.models.embedded import EMBEDDED, embedded_gguf, embedded_head

_log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>\S+))?")
_TEXT_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
)
_ALWAYS = (*_TEXT_FILES, TABLE_NAME)
# Named one by one: repositories also carry the same weights in other formats.
_SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json")
_SAMPLE_BYTES = 1 << 20


def resolve_target(spec: str, cache_dir: Path | None = None) -> Path:
    """Return the checkpoint folder of a target: config, safetensors, tokenizer, chat template.

    spec:      "embedded", a folder, a ``.gguf`` file, or a hub id with an optional ``@revision``.
    cache_dir: where GGUF files are converted to, once each; default ``EAGLE2_CACHE_DIR`` or ``~/.cache/eagle2``.

    Raises ``ModelError`` where nothing is found under that name.
    """
    if spec == EMBEDDED:
        return _converted(embedded_gguf(), cache_dir)
    path = Path(spec).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"The target {spec!r} is not there: no such GGUF file.")
        return _converted(path, cache_dir)
    return _folder_or_hub(spec, path, "target")


def resolve_draft(spec: str) -> Path:
    """Return the checkpoint folder of a draft head: "embedded", a folder, or a hub id with an optional ``@revision``.

    Raises ``ModelError`` where nothing is found under that name.
    """
    if spec == EMBEDDED:
        return embedded_head()
    return _folder_or_hub(spec, Path(spec).expanduser(), "draft head")


def _folder_or_hub(spec: str, path: Path, role: str) -> Path:
    if spec and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"The {role} {spec!r} is not a checkpoint: the folder has no config.json.")
        return path
    hub = _HUB_ID.fullmatch(spec)
    if hub is None:
        raise ModelError(
            f"The {role} {spec!r} is not there; name a folder, a hub id such as owner/name, or {EMBEDDED!r}"
            f"{', or a .gguf file' if role == 'target' else ''}."
        )
    return _download(hub["repo"], hub["revision"], role)


def _download(repo: str, revision: str | None, role: str) -> Path:
    # Imported late: most starts are local, and the library is slow to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*_ALWAYS, *patterns]))

    _log.info("Fetching the %s %s from the hub.", role, repo)
    try:
        folder = fetch(*_SAFETENSORS)
        if not any(folder.glob("model*.safetensors")):
            folder = fetch(*_PICKLES)
    except (OSError, ValueError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"The {role} {repo!r} is no local folder and cannot be fetched from the hub{at}: {reason}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"The {role} {repo!r} is not a checkpoint: its repository has no config.json.")
    return folder


def _converted(path: Path, cache_dir: Path | None) -> Path:
    """The folder that ``path`` was or is now converted to. Safe when several processes ask at once."""
    cache = cache_dir or Path(os.environ.get("EAGLE2_CACHE_DIR") or "~/.cache/eagle2").expanduser()
    folder = cache / f"{path.stem}-{_fingerprint(path)}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"The cache folder {cache} cannot be made ({error}); set EAGLE2_CACHE_DIR to another."
        ) from error
    with _locked(cache / f"{folder.name}.lock"):
        if folder.is_dir():  # another process made it while this one waited
            return folder
        _log.info("Converting %s to %s; this is done once.", path, folder)
        began = time.monotonic()
        partial = cache / f"{folder.name}.partial"
        # Only the holder of the lock works here, so what lies there was left by a process that died.
        shutil.rmtree(partial, ignore_errors=True)
        try:
            gguf.convert(path, partial)
            # A rename is all or nothing: a folder under the final name is complete.
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _log.info("Converted %s in %.1f s.", path.name, time.monotonic() - began)
    return folder


def _fingerprint(path: Path) -> str:
    """Short digest of size, time and both ends of a file; reading 8 GB to hash it would delay every start."""
    status = path.stat()
    digest = hashlib.sha256(f"{gguf.FORMAT_VERSION} {status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, status.st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the system frees it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
