"""JSON values that are spread over lines: one array of entries, or entries one after another. Read through a window.

After a syntax error nothing says where the next entry begins, so reading ends there; that is reported, not passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from outrider.lab.workload.types import BadLine, FileEntry

WINDOW = 1 << 20  # characters read at a time
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


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
