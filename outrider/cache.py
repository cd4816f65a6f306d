"""The folders of files that a later start may use. One is a cache: a native library built here,
costs of steps, findings of earlier starts. The other has what a user would miss: saved
conversations.

What lies in the cache is run, so it must be the user's own: a folder of another user, or one that
everybody may write to, is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import first_line
from outrider.wellformed import parsed_json, regular_bytes

log = logging.getLogger("outrider.cache")
_warned: set[str] = set()


def cache_folder() -> Path:
    """$OUTRIDER_CACHE, else `outrider` in $XDG_CACHE_HOME, which must be absolute, else in
    ~/.cache."""
    if named := os.environ.get("OUTRIDER_CACHE"):
        return Path(named).expanduser()
    return _of_user("XDG_CACHE_HOME", "~/.cache")


def state_folder() -> Path:
    """The folder of what a user would miss: `outrider` in $XDG_STATE_HOME, which must be absolute,
    else in ~/.local/state."""
    return _of_user("XDG_STATE_HOME", "~/.local/state")


def _of_user(variable: str, otherwise: str) -> Path:
    named = Path(os.environ.get(variable) or otherwise).expanduser()
    return (named if named.is_absolute() else Path(otherwise).expanduser()) / "outrider"


def why_unsafe(path: Path) -> str | None:
    """The reason not to use a folder or file of the cache, and what to do; None where it is safe,
    or not there.

    Safe is what only its owner can change, who must be the user of this process or root.
    """
    if not hasattr(os, "geteuid"):  # Windows: folders in a user's profile are that user's alone
        return None
    root = cache_folder()
    inside = (
        [parent for parent in path.parents if parent.is_relative_to(root)]
        if path.is_relative_to(root)
        else [path.parent]
    )
    for place in [*reversed(inside), path]:
        try:
            state = place.stat()
        except OSError:  # it is not there, or cannot be looked at: opening it will say so
            return None
        if state.st_uid not in (os.geteuid(), 0):
            return (
                f"'{place}' belongs to user {state.st_uid}, not to user {os.geteuid()}: "
                f"{_remedy(path)}"
            )
        if state.st_mode & stat.S_IWOTH or (
            state.st_mode & stat.S_IWGRP and state.st_gid not in _groups()
        ):
            return (
                f"'{place}' can be changed by other users: chmod go-w '{place}', or {_remedy(path)}"
            )
    return None


def make_folder(path: Path) -> None:
    """Make a folder of the cache, the user's own. Raises OSError where it cannot be made, or is
    unsafe."""
    root = cache_folder()
    for folder in [root, path] if path.is_relative_to(root) else [path]:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_unsafe(path)


def keep_json(path: Path, content: Any, *, max_files: int) -> None:
    """Write a file whole or not at all; the oldest ones beyond `max_files` in its folder go. Raises
    OSError where it cannot."""
    text = json.dumps(content)
    write_private(path, f"{_digest(text)}\n{text}\n")
    for old in sorted(path.parent.glob("*.json"), key=_changed_at)[:-max_files]:
        old.unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write a file whole or not at all, for its owner's eyes alone. Raises OSError where it
    cannot."""
    make_folder(path.parent)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)


@contextmanager
def keeping(what: str) -> Iterator[None]:
    """Whatever fails while something is kept costs the next start its time, and one line in the
    log; this start goes its way.

    A folder that cannot be written is no news. Any other error is a fault of ours, so its line is a
    warning.
    """
    try:
        yield
    except OSError as error:
        log.info("%s: not kept for the next start: %s", what, error)
    except Exception as error:  # noqa: BLE001  whatever it is, the start itself has worked
        log.warning(
            "%s: not kept for the next start, which works without: %s: %s",
            what,
            type(error).__name__,
            first_line(error),
        )


def kept_json(path: Path, read: Callable[[Any], Any] = lambda content: content) -> Any:
    """The content that `keep_json` wrote to this file, as `read` makes it; None where there is
    none, or a damaged one."""
    try:
        refuse_unsafe(path)
        digest, text = regular_bytes(path).decode("utf-8").rstrip("\n").split("\n")
        return read(parsed_json(text)) if digest == _digest(text) else None
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001  the file may say anything: what comes of it is found by trying
        log.info("'%s' is not used: %s", path, error)
        return None


def refuse_unsafe(path: Path) -> None:
    """Raises OSError for a path that is unsafe, which a warning says once, and for one that is no
    file or folder."""
    if (why := why_unsafe(path)) is None:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(f"'{path}' is no regular file")
        return
    if why not in _warned:
        _warned.add(why)
        folder = "the state folder" if path.is_relative_to(state_folder()) else "the cache"
        log.warning("%s is not used: %s", folder, why)
    raise PermissionError(why)


def _remedy(path: Path) -> str:
    variable = "XDG_STATE_HOME" if path.is_relative_to(state_folder()) else "OUTRIDER_CACHE"
    return f"set {variable} to a folder of your own"


def _groups() -> list[int]:
    """The groups of this process, which may share a cache on purpose."""
    return [os.getegid(), *os.getgroups()]


def _changed_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # another process has removed it, or it is a broken link
        return 0.0


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
