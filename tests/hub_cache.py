"""A cache of the hub's client, filled as downloads leave it, for tests without a network."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put(cache: Path, name: str, write: Callable[[Path], object]) -> Path:
    """The snapshot of a repository, whose files `write` makes in the folder that it is handed."""
    home = cache / f"models--{name.replace('/', '--')}"
    shutil.rmtree(home, ignore_errors=True)
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    write(snapshot)
    return snapshot
