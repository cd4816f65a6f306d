"""How entries lie in a file: one a line, JSON values one after another, or blocks of text. The beginning of a file decides.

Each reader yields `FileEntry` or `BadLine`, keeps no more of the file than one entry, and counts lines from 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TextIO

from outrider.lab.workload.json_values import read_array, read_documents
from outrider.lab.workload.types import BadLine, FileEntry

Container = Callable[[TextIO], Iterator[FileEntry | BadLine]]
_ARRAY = re.compile(r'\s*\[\s*(?:[\[{"\]]|$)')  # "[INST] ..." and "[1] ..." are text


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
