"""A file or folder that one run at a time writes: two that share one would mix, or write twice, what they find."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.cache import cache_folder, make_folder
from outrider.errors import ConfigError
from outrider.lazy import filelock

log = logging.getLogger("outrider.lab")


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """`with claimed(path):` no other process writes `path` meanwhile. Raises ConfigError where one does.

    A machine on which no lock can be kept has none.
    """
    name = hashlib.blake2b(str(path.absolute()).encode(), digest_size=16).hexdigest()
    lock = filelock.FileLock(cache_folder() / "locks" / f"{name}.lock", timeout=0)
    try:
        make_folder(Path(lock.lock_file).parent)
        lock.acquire()
    except filelock.Timeout as error:
        raise ConfigError(f"another run writes {path}: wait for its end, or give this one another --out") from error
    except OSError as error:
        log.info("%s is not locked against other runs: %s", path, error)
    try:
        yield
    finally:
        lock.release()
