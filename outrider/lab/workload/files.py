"""A file of prompts, whatever its form: opened, recognised by its content, and read entry by entry.

The name of a file says nothing: `container_of` tells from its beginning how entries lie in it, `read_entry` tells from the fields
of each entry what it is. Gzip and UTF-16 are unpacked; other packings are refused with what to do. Bytes that are not UTF-8
are a fault of the entry that holds them, not of the file.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.lab.workload.containers import Container, container_of, read_blocks
from outrider.lab.workload.formats import read_entry
from outrider.lab.workload.formats.fields import Fields, Turns, UnusableError
from outrider.lab.workload.types import BadLine, FileEntry, WorkloadRequest

PEEK = 1 << 16  # bytes by which a file is recognised
GZIP = b"\x1f\x8b"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
PACKED = {
    b"PAR1": "a Parquet file; convert it: pandas.read_parquet(FILE).to_json('prompts.jsonl', orient='records', lines=True)",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "packed with zstd; unpack it first (zstd -d)",
    b"BZh": "packed with bzip2; unpack it first (bunzip2)",
    b"\xfd7zXZ\x00": "packed with xz; unpack it first (unxz)",
    b"\x93NUMPY": "a NumPy array, not a file of prompts",
    b"SQLite format 3\x00": "a SQLite database, not a file of prompts",
}
Wanted = Callable[[Fields], bool]


class RequestFile:
    """Requests of one file. `requests` reads it once; `is_text` is known from then on."""

    def __init__(self, path: Path, name: str, *, turns: Turns = "first", wanted: Wanted | None = None) -> None:
        self.name = name  # in ids, notes and messages
        self.is_text = False  # plain text, which the user should know
        self._path, self._turns, self._wanted = path, turns, wanted

    def requests(self) -> Iterator[WorkloadRequest | BadLine]:
        """In the order of the file. Raises ConfigError when the file cannot be read or has no entries."""
        empty = True
        try:
            with self._path.open("rb", buffering=0) as raw:
                for entry in self._entries(raw):
                    empty = False
                    yield from self._read(entry)
        except UnicodeError as error:  # UTF-16 only
            raise ConfigError(f"{self.name} begins as UTF-16 but is damaged: {error}") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{self.name} is a damaged gzip file: {error}") from error
        except OSError as error:
            raise ConfigError(f"{self.name} cannot be read: {error.strerror or error}") from error
        if empty:
            raise ConfigError(f"{self.name} is empty: it has no prompts")

    def _entries(self, raw: io.RawIOBase) -> Iterator[FileEntry | BadLine]:
        file: io.BufferedReader[Any] = io.BufferedReader(raw, PEEK)
        start = file.peek(PEEK)
        if start.startswith(GZIP):
            file = io.BufferedReader(gzip.GzipFile(fileobj=file), PEEK)
            start = file.peek(PEEK)
        for magic, what in PACKED.items():
            if start.startswith(magic):
                raise ConfigError(f"{self.name} is {what}")
        text, container = _open_text(file, start)
        self.is_text = container is read_blocks
        return container(text)

    def _read(self, entry: FileEntry | BadLine) -> Iterator[WorkloadRequest | BadLine]:
        if isinstance(entry, BadLine):
            yield entry
            return
        if self._wanted is not None and isinstance(entry.value, dict) and not self._wanted(entry.value):
            return
        try:
            found = read_entry(entry.value, self._turns)
        except UnusableError as error:
            yield BadLine(entry.line, f"{f'entry {entry.label[1:]}: ' if entry.label[0] == '#' else ''}{error}")
            return
        for turn, request in enumerate(found, 1):
            if request.id:
                yield request
            else:
                part = f"/{turn}" if len(found) > 1 else ""
                yield replace(request, id=f"{self.name}{entry.label}{part}")


def _open_text(file: io.BufferedReader[Any], start: bytes) -> tuple[io.TextIOWrapper, Container]:
    """The file as text, lines ending at \\n only, and the reader for it."""
    if start.startswith(UTF16):
        return io.TextIOWrapper(file, encoding="utf-16", newline="\n"), container_of(start.decode("utf-16", "replace"))
    container = container_of(start.decode("utf-8-sig", "replace"))
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n"), container
