"""What stands at the two ends of most reports: where the result comes from, and what to keep in mind."""

from __future__ import annotations

from outrider.lab.result import Result
from outrider.report.document import Block, Bullets, Heading


def origin(result: Result, *facts: str) -> str:
    """One line under a title: date, version, processor, and what else there is to say. Empty facts are left out."""
    words = [f"{result.created:%Y-%m-%d %H:%M} UTC", f"outrider {result.versions.get('outrider', '?')}"]
    return " · ".join(filter(None, [*words, str(result.machine.get("cpu", "")), *facts]))


def to_keep_in_mind(result: Result) -> list[Block]:
    """The result's notes, where it has any."""
    return [Heading("To keep in mind"), Bullets(result.notes)] if result.notes else []
