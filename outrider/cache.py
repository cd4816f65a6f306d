"""The folder of files that a later start may use: a native library built here, costs of steps, findings of earlier starts."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """$OUTRIDER_CACHE, else the user's cache folder."""
    base = os.environ.get("OUTRIDER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "outrider"
    return Path(base).expanduser()


def keep_json(path: Path, content: Any, *, max_files: int) -> None:
    """Write a file whole or not at all; the oldest ones beyond `max_files` in its folder go. Raises OSError where it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".new")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    os.replace(scratch, path)
    for old in sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)[:-max_files]:
        old.unlink(missing_ok=True)
