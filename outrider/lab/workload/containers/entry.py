"""One entry of a file, before anybody knows what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FileEntry:
    """A JSON value, or a block of text as `{"prompt": text}`."""

    line: int  # where it begins, from 1
    label: str  # ":LINE", or "#N" where several entries may share a line; ids are made of it
    value: Any
