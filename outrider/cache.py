"""Where files lie that a later start may use: a native library built here, costs of steps, digests of weights."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$OUTRIDER_CACHE, else the user's cache folder."""
    base = os.environ.get("OUTRIDER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "outrider"
    return Path(base).expanduser()
