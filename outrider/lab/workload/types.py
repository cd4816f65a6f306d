"""Requests, a workload of them, and what lies in files before it is either.

Bad lines are sorted out while a file is read, and listed where they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outrider.counted import counted

Task = Literal["reasoning", "code", "chat", "translation", "summarization", "qa", "rag", "other"]
OnBad = Literal["skip", "refuse"]
SHOWN = 5  # in a message
FORMS = 'a request is a line like {"prompt": "..."}, or another form of docs/workloads.md'
REMEDY = "correct them, or leave them out (on_bad='skip', --set on_bad=skip)"


@dataclass(frozen=True)
class WorkloadRequest:
    """One prompt. Exactly one of `prompt` and `messages` is given."""

    id: str  # unique in its workload, the same in every run
    prompt: str | None = None  # fed as it is
    messages: tuple[dict[str, str], ...] | None = None  # a conversation ({"role", "content"}), for the model's chat template
    task: str = "other"  # one of Task, or the workload's own word
    reference: str | None = None  # the right final answer, where one is known: what `grade` compares with
    answer: str | None = None  # a model's answer to it, where the workload is a log
    max_tokens: int | None = None  # asked for in the log


@dataclass(frozen=True)
class BadLine:
    """A line of a file that is no request."""

    number: int  # from 1
    reason: str


@dataclass(frozen=True)
class FileEntry:
    """One entry of a file, before anybody knows what is in it: a JSON value, or a block of text as `{"prompt": text}`."""

    line: int  # where it begins, from 1
    label: str  # ":LINE", or "#N" where several entries may share a line; ids are made of it
    value: Any


@dataclass(frozen=True)
class Workload:
    """Requests under a name."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    skipped: tuple[BadLine, ...] = ()
    notes: tuple[str, ...] = field(default=())  # where it comes from, as a person should know

    def firsts(self, count: int) -> Workload:
        """A workload of the first `count` requests of every task."""
        found: dict[str, list[WorkloadRequest]] = {}
        for request in self.requests:
            found.setdefault(request.task, []).append(request)
        kept = {request.id for of_task in found.values() for request in of_task[:count]}
        return replace(self, requests=tuple(request for request in self.requests if request.id in kept))


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
        """The bad lines, with the name of the part in front in a mix: a number alone would not say in which file."""
        return [line if name is None else replace(line, reason=f"{name}: {line.reason}") for line in self._kept]

    def message(self, name: str, num_good: int) -> str:
        """Why the workload is refused."""
        bad = counted(self.count, "bad line")
        head = f"{name} has {bad} beside {num_good} good ones:" if num_good else f"{name} has no usable line, but {bad}:"
        lines = [f"line {line.number}: {line.reason}" for line in self._kept]
        return listing(head, lines, self.count, REMEDY if num_good else FORMS)


def listing(head: str, items: Iterable[str], count: int, remedy: str) -> str:
    """A message that lists the first few of `count` items."""
    shown = list(items)[:SHOWN]
    more = [f"and {count - len(shown)} more"] if count > len(shown) else []
    listed = ";\n".join(f"  {item}" for item in [*(item.rstrip(".") for item in shown), *more])
    return f"{head}\n{listed}{'' if listed.endswith('?') else '.'}\n{remedy[:1].upper()}{remedy[1:]}"
