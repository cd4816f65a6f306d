"""What `outrider export` wrote and found: the folder's `export.json`."""

from __future__ import annotations

from typing import Literal

from outrider.lab.result import Result

FILE = "export.json"


class ExportResult(Result):
    """The export of one drafter."""

    kind: Literal["export"] = "export"
    drafter: str  # its kind
    layout: str
    source: str
    target: str
    checks: list[str]  # what --check found, one line each; empty without it
