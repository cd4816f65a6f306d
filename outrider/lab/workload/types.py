"""Requests, a workload of them, and what lies in files before it is either."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Task = Literal["reasoning", "code", "chat", "translation", "summarization", "qa", "rag", "other"]


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
