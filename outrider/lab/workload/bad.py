"""Bad lines: sorted out while a file is read, listed where they are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from outrider.lab.workload.types import BadLine, WorkloadRequest

OnBad = Literal["skip", "refuse"]
SHOWN = 5  # in a message
FORMS = 'a request is a line like {"prompt": "..."}, or another form of docs/workloads.md'
REMEDY = "correct them, or leave them out (on_bad='skip', --set on_bad=skip)"


class BadLines:
    """Bad lines of one part of a workload. All are kept where they are skipped, else only those that are shown."""

    def __init__(self, *, keep_all: bool) -> None:
        self.count = 0
        self._kept: list[BadLine] = []
        self._keep_all = keep_all

    def sorted_out(self, found: Iterable[WorkloadRequest | BadLine]) -> Iterator[WorkloadRequest]:
        """The requests; bad lines stay here."""
        for one in found:
            if isinstance(one, WorkloadRequest):
                yield one
                continue
            self.count += 1
            if self._keep_all or len(self._kept) < SHOWN:
                self._kept.append(one)

    def lines_of(self, name: str | None) -> list[BadLine]:
        """With the name of the part in front, in a mix: a number alone would not say in which file."""
        return [line if name is None else replace(line, reason=f"{name}: {line.reason}") for line in self._kept]

    def message(self, name: str, num_good: int) -> str:
        """Why the workload is refused."""
        bad = f"{self.count} bad line{'s' if self.count > 1 else ''}"
        head = f"{name} has {bad} beside {num_good} good ones:" if num_good else f"{name} has no usable line, but {bad}:"
        lines = [f"line {line.number}: {line.reason}" for line in self._kept]
        return listing(head, lines, self.count, REMEDY if num_good else FORMS)


def listing(head: str, items: Iterable[str], count: int, remedy: str) -> str:
    """A message that lists the first few of `count` items."""
    shown = list(items)[:SHOWN]
    more = [f"and {count - len(shown)} more"] if count > len(shown) else []
    listed = ";\n".join(f"  {item}" for item in [*(item.rstrip(".") for item in shown), *more])
    return f"{head}\n{listed}{'' if listed.endswith('?') else '.'}\n{remedy[:1].upper()}{remedy[1:]}"
