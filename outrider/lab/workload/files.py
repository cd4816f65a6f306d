"""A file of prompts, whatever its form (docs/workloads.md): opened, recognised by its content, and read entry by entry.

`container_of` tells from its beginning how entries lie in a file; `read_entry` tells from the fields of each entry what it is.
Bytes that are not UTF-8 are a fault of the entry that holds them. Each reader of a container yields `FileEntry` or `BadLine`,
keeps no more of the file than one entry, and counts lines from 1. JSON values that are spread over lines are read through a
window.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from outrider.errors import ConfigError
from outrider.lab.workload.fields import Fields, Turns, UnusableError
from outrider.lab.workload.formats import read_entry
from outrider.lab.workload.types import BadLine, FileEntry, WorkloadRequest
from outrider.wellformed import parsed_json

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
Container = Callable[[TextIO], Iterator[FileEntry | BadLine]]
_ARRAY = re.compile(r'\s*\[\s*(?:[\[{"\]]|$)')  # "[INST] ..." and "[1] ..." are text
WINDOW = 1 << 20  # characters read at a time
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


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


def container_of(start: str) -> Container:
    """The reader for a file that begins with `start`, at best some ten thousand characters."""
    lines = [line for line in map(str.strip, start.split("\n")) if line]
    if _ARRAY.match(start):
        return read_array
    if lines and lines[0] == "{":  # spread over lines, as `jq` and editors write it
        return read_documents
    # Not by the first line alone: it may be the bad one.
    objects = sum(line.startswith("{") for line in lines)
    return read_lines if objects and 2 * objects >= len(lines) else read_blocks


def read_lines(file: TextIO) -> Iterator[FileEntry | BadLine]:
    """JSON lines: an entry for every line that is not blank. A broken line is a bad line, and reading goes on."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield FileEntry(number, f":{number}", parsed_json(line))
        except ValueError as error:
            yield BadLine(number, _not_json(line, error))


def _not_json(line: str, error: ValueError) -> str:
    if "\0" in line:
        return "not JSON: it holds NUL bytes; the file is damaged, binary, or UTF-16 without its mark"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return f"not JSON: {error}"


def read_blocks(file: TextIO) -> Iterator[FileEntry | BadLine]:
    """Plain text: a prompt for every run of lines that are not blank. Line breaks inside it belong to the prompt."""
    block: list[str] = []
    number = 0
    for number, line in enumerate(file, 1):
        if line.strip():
            block.append(line.rstrip("\r\n"))
        elif block:
            yield _prompt(number - len(block), block)
            block = []
    if block:
        yield _prompt(number - len(block) + 1, block)


def _prompt(line: int, block: list[str]) -> FileEntry | BadLine:
    text = "\n".join(block)
    if "\0" in text:
        return BadLine(line, "NUL bytes: this is no text; the file is binary, or UTF-16 without its mark")
    return FileEntry(line, f":{line}", {"prompt": text})


class BrokenError(Exception):
    """The text is no JSON from `line` on."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def read_array(file: TextIO, window: int = WINDOW) -> Iterator[FileEntry | BadLine]:
    """The entries of `[entry, entry, ...]`."""
    text = ReadWindow(file, window)
    try:
        text.expect("[")
        index = 0
        while text.peek() != "]":
            if index:
                text.expect(",")
            text.peek()
            index += 1
            yield FileEntry(text.line, f"#{index}", text.take())
        text.expect("]")
        if text.peek():
            raise BrokenError(text.line, "something follows the end of the list")
    except BrokenError as error:
        yield _end(error)


def read_documents(file: TextIO, window: int = WINDOW) -> Iterator[FileEntry | BadLine]:
    """Entries with nothing but space between them."""
    text = ReadWindow(file, window)
    index = 0
    try:
        while text.peek():
            index += 1
            yield FileEntry(text.line, f"#{index}", text.take())
    except BrokenError as error:
        yield _end(error)


def _end(error: BrokenError) -> BadLine:
    return BadLine(error.line, f"{error}; nothing behind this point could be read")


class ReadWindow:
    """The part of a file that holds the next value. Grows until the value fits, forgets what was taken."""

    def __init__(self, file: TextIO, size: int) -> None:
        self.line = 1  # of the next character
        self._file, self._size = file, size
        self._text, self._at = "", 0

    def peek(self) -> str:
        """Go to the next character that is no space, and show it; "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._advance(match.end() if match else self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def expect(self, character: str) -> None:
        """Take this character. Raises BrokenError where another one stands."""
        found = self.peek()
        if found != character:
            instead = repr(found) if found else "the end of the file"
            raise BrokenError(self.line, f"not JSON: expected '{character}', found {instead}")
        self._advance(self._at + 1)

    def take(self) -> Any:
        """Take the next value. Raises BrokenError where there is none."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise BrokenError(self.line, "nested too deeply to be a request") from error
            except ValueError as error:
                if self._more():
                    continue
                raise self._broken(error) from error
            # "12" may be the beginning of "12.5e3"; every other value shows its end
            if isinstance(value, int | float) and end + 2 >= len(self._text) and self._more():
                continue
            self._advance(end)
            return value

    def _broken(self, error: ValueError) -> BrokenError:
        if not isinstance(error, json.JSONDecodeError):
            return BrokenError(self.line, f"not JSON: {error}")
        line = self.line + self._text.count("\n", self._at, error.pos)
        return BrokenError(line, f"not JSON: {error.msg}")

    def _advance(self, to: int) -> None:
        self.line += self._text.count("\n", self._at, to)
        self._at = to

    def _more(self) -> bool:
        """Read on; False at the end of the file. Reads as much as is waiting already, so long values cost linear time."""
        rest = self._text[self._at :]
        new = self._file.read(max(self._size, len(rest)))
        if new:
            self._text, self._at = rest + new, 0
        return bool(new)
