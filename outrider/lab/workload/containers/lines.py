"""JSON lines: an entry per line. A line that is broken is a bad line, and the next one is read as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TextIO

from outrider.lab.workload.containers.entry import FileEntry
from outrider.lab.workload.types import BadLine


def read_lines(file: TextIO) -> Iterator[FileEntry | BadLine]:
    """Every line that is not blank."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield FileEntry(number, f":{number}", json.loads(line))
        except ValueError as error:
            yield BadLine(number, _reason(line, error))
        except RecursionError:
            yield BadLine(number, "nested too deeply to be a request")


def _reason(line: str, error: ValueError) -> str:
    if "\0" in line:
        return "not JSON: it holds NUL bytes; the file is damaged, binary, or UTF-16 without its mark"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return f"not JSON: {error}"
