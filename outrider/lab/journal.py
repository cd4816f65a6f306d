"""The journal of a long run on disk, so that Ctrl-C and crashes cost one unit of work and no more.

    with Journal.open(path, plan, resume=True) as journal:
        for key in work:
            journal.unit(key, measure, key)       # plain JSON data, measured unless it is there

The file is JSON lines: a head with the plan, then one line a unit. A resumed run must have the same
plan (what is measured, with which code); half a last line, from a crash while writing, is dropped.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.cache import cache_folder, make_folder
from outrider.errors import ConfigError, OutriderError
from outrider.lab.progress import QUIET, Progress
from outrider.lazy import filelock
from outrider.wellformed import parsed_json


class Journal:
    """Finished units by key, and the progress that is told of them; without a path in memory alone."""

    def __init__(
        self,
        path: Path | None = None,
        done: dict[str, Any] | None = None,
        progress: Progress = QUIET,
    ) -> None:
        self.path = path
        self.progress = progress
        self._done = done or {}

    @classmethod
    def open(
        cls, path: Path, plan: dict[str, Any], *, resume: bool, progress: Progress = QUIET
    ) -> Journal:
        """Start anew, or continue. Raises ConfigError when there is nothing to continue with, or when the
        plan was another."""
        if resume:
            return cls(path, _read(path, plan), progress)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"plan": plan}) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        return cls(path, progress=progress)

    def __enter__(self) -> Journal:
        """`with journal:` work that may fail or be interrupted: a file that holds nothing does not
        outlive it."""
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is not None and not self._done:
            self.close()

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def __getitem__(self, key: str) -> Any:
        return self._done[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._done)

    def __len__(self) -> int:
        return len(self._done)

    def add(self, key: str, value: Any) -> None:
        """Remember one finished unit; on disk when this returns."""
        if self.path is not None:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "value": value}) + "\n")
            except OSError as error:
                raise OutriderError(
                    f"{self.path} cannot be written ({error.strerror}); {len(self)} units are kept: "
                    "make room, then the same command with --resume"
                ) from error
        self._done[key] = value

    def unit(self, key: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """A unit's value: read, or what `run(*arguments)` returns now."""
        if key in self._done:
            self.progress.skip(1)
        else:
            self.add(key, run(*arguments))
            self.progress.advance()
        return self._done[key]

    def close(self) -> None:
        """Everything is done and written elsewhere: the file goes."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _read(path: Path, plan: dict[str, Any]) -> dict[str, Any]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no interrupted run to resume ({path} does not exist); leave --resume out"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); leave --resume out to start anew"
        ) from error
    try:
        before = parsed_json(lines[0])["plan"]
        # what follows the last newline was not finished
        whole = [line for line in lines[1:-1] if line]
        done = {entry["key"]: entry["value"] for entry in map(parsed_json, whole)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged and cannot be resumed; leave --resume out to start anew"
        ) from error
    now = json.loads(json.dumps(plan))  # what JSON makes of it: tuples are lists there
    if different := sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
        raise ConfigError(
            f"the interrupted run had another plan ({', '.join(different)}); leave --resume out "
            "to start anew"
        )
    if lines[-1]:
        path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    return done


log = logging.getLogger("outrider.lab")


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """`with claimed(path):` no other process writes `path` meanwhile. Raises ConfigError where one
    does.

    A machine on which no lock can be kept has none.
    """
    name = hashlib.blake2b(str(path.absolute()).encode(), digest_size=16).hexdigest()
    lock = filelock.FileLock(cache_folder() / "locks" / f"{name}.lock", timeout=0)
    try:
        make_folder(Path(lock.lock_file).parent)
        lock.acquire()
    except filelock.Timeout as error:
        raise ConfigError(
            f"another run writes {path}: wait for its end, or give this one another --out"
        ) from error
    except OSError as error:
        log.info("%s is not locked against other runs: %s", path, error)
    try:
        yield
    finally:
        lock.release()
