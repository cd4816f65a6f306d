"""Can what a verb will leave be written? Asked before hours of work, not found out after them.

Both look and write nothing: what is refused later leaves no empty files behind.
"""

from __future__ import annotations

import os
from pathlib import Path

from outrider.errors import ConfigError


def check_file(path: Path) -> None:
    """Raises ConfigError where no file can be written: a folder of that name, no folder for it, no permission."""
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; name a file in it")
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise ConfigError(f"the folder of {path} does not exist; create it first")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: no permission")


def check_folder(path: Path) -> None:
    """Raises ConfigError where no folder can be made or filled: a file of that name or above it, no permission."""
    nearest = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))  # "/" is always there
    if not os.path.isdir(nearest):
        raise ConfigError(f"{nearest} is a file; a folder is needed there. Give another --out")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: no permission in {nearest}")
