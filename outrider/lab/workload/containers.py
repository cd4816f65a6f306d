"""How entries lie in a file: one a line, JSON values one after another, or blocks of text. The beginning of a file decides.

Each reader yields `FileEntry` or `BadLine`, keeps no more of the file than one entry, and counts lines from 1. JSON values that
are spread over lines are read through a window. After a syntax error in them nothing says where the next entry begins, so reading
ends there; that is reported, not passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from outrider.lab.workload.types import BadLine, FileEntry

Container = Callable[[TextIO], Iterator[FileEntry | BadLine]]
_ARRAY = re.compile(r'\s*\[\s*(?:[\[{"\]]|$)')  # "[INST] ..." and "[1] ..." are text
WINDOW = 1 << 20  # characters read at a time
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


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
            yield FileEntry(number, f":{number}", json.loads(line))
        except ValueError as error:
            yield BadLine(number, _not_json(line, error))
        except RecursionError:
            yield BadLine(number, "nested too deeply to be a request")


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
