"""How entries lie in a file: one a line, JSON values one after another, or blocks of text. The beginning of a file decides.

Each reader yields `FileEntry` or `BadLine`, keeps no more of the file than one entry, and counts lines from 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TextIO

from outrider.lab.workload.containers.blocks import read_blocks
from outrider.lab.workload.containers.entry import FileEntry
from outrider.lab.workload.containers.lines import read_lines
from outrider.lab.workload.containers.values import read_array, read_documents
from outrider.lab.workload.types import BadLine

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
