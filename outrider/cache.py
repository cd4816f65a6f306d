"""The folder of files that a later start may use: a native library built here, costs of steps, findings of earlier starts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import first_line

log = logging.getLogger("outrider.cache")


def cache_folder() -> Path:
    """$OUTRIDER_CACHE, else the user's cache folder."""
    base = os.environ.get("OUTRIDER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "outrider"
    return Path(base).expanduser()


def keep_json(path: Path, content: Any, *, max_files: int) -> None:
    """Write a file whole or not at all; the oldest ones beyond `max_files` in its folder go. Raises OSError where it cannot."""
    text = json.dumps(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".new")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f"{_digest(text)}\n{text}\n")
    os.replace(scratch, path)
    for old in sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)[:-max_files]:
        old.unlink(missing_ok=True)


@contextmanager
def keeping(what: str) -> Iterator[None]:
    """Whatever fails while something is kept costs the next start its time, and one line in the log; this start goes its way.

    A folder that cannot be written is no news. Any other error is a fault of ours, so its line is a warning.
    """
    try:
        yield
    except OSError as error:
        log.info("%s: not kept for the next start: %s", what, error)
    except Exception as error:  # noqa: BLE001  whatever it is, the start itself has worked
        log.warning("%s: not kept for the next start, which works without: %s: %s", what, type(error).__name__, first_line(error))


def kept_json(path: Path) -> Any:
    """What `keep_json` wrote to this file; None where there is none, or a damaged one."""
    try:
        digest, text = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        return json.loads(text) if digest == _digest(text) else None
    except (OSError, ValueError):
        return None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
