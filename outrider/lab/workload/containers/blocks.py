"""Plain text: a prompt per block, blank lines between blocks. Line breaks inside a block belong to the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from outrider.lab.workload.containers.entry import FileEntry
from outrider.lab.workload.types import BadLine


def read_blocks(file: TextIO) -> Iterator[FileEntry | BadLine]:
    """Every run of lines that are not blank."""
    block: list[str] = []
    number = 0
    for number, line in enumerate(file, 1):
        if line.strip():
            block.append(line.rstrip("\r\n"))
        elif block:
            yield _entry(number - len(block), block)
            block = []
    if block:
        yield _entry(number - len(block) + 1, block)


def _entry(line: int, block: list[str]) -> FileEntry | BadLine:
    text = "\n".join(block)
    if "\0" in text:
        return BadLine(line, "NUL bytes: this is no text; the file is binary, or UTF-16 without its mark")
    return FileEntry(line, f":{line}", {"prompt": text})
