"""Requests, a workload of them, and the lines of a file that are none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from outrider.machine import versions

if TYPE_CHECKING:
    from outrider.build import Options

Task = Literal["reasoning", "code", "chat", "translation", "summarization", "qa", "rag", "other"]
OnBad = Literal["skip", "refuse"]
# of a conversation: its first question; all, each with the turns before it; auto: the first of a
# recorded one, all of one whose questions were written without answers
Turns = Literal["auto", "first", "all"]
SHOWN = 5  # in a message
NUMBER = re.compile(r"(?<![\w).])-?\$?-?\d(?:\d|,(?=\d))*(?:\.\d+)?")


@dataclass(frozen=True)
class WorkloadRequest:
    """One prompt. Exactly one of `prompt` and `messages` is given."""

    id: str  # unique in its workload, the same in every run
    prompt: str | None = None  # fed as it is
    # a conversation ({"role", "content"}), for the chat template
    messages: tuple[dict[str, str], ...] | None = None
    task: str = "other"  # one of Task, or the workload's own word
    reference: str | None = None  # the right final answer, where one is known
    answer: str | None = None  # a model's answer to it, where the workload is a log
    max_tokens: int | None = None  # asked for in the log
    # questions that follow, each asked after the model's own answer to the one before
    later: tuple[str, ...] = ()
    turn: int = 1  # of its conversation

    @property
    def question(self) -> str:
        """The text that is asked, of a conversation the last message."""
        return self.messages[-1]["content"] if self.messages else self.prompt or ""

    @property
    def turn_ids(self) -> list[str]:
        """The ids of this request and of the turns that follow."""
        turns = range(self.turn + 1, self.turn + 1 + len(self.later))
        return [self.id, *(self._id_of(turn) for turn in turns)]

    def _id_of(self, turn: int) -> str:
        first = self.id if self.turn == 1 else self.id.removesuffix(f"/{self.turn}")
        return f"{first}/{turn}"

    def next_turn(self, answer: str) -> WorkloadRequest:
        """The next question of the conversation, the model's `answer` to this one before it."""
        question, *later = self.later
        said = (
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        )
        turn = self.turn + 1
        return replace(
            self,
            id=self._id_of(turn),
            messages=(*(self.messages or ()), *said),
            later=tuple(later),
            turn=turn,
            reference=None,
            answer=None,
        )

    def is_right(self, text: str) -> bool | None:
        """Whether a text ends with the right number; None where the right answer is no number, or
        not known."""
        expected = _number(self.reference or "")
        return None if expected is None else _final_number(text) == expected


def _final_number(text: str) -> str | None:
    """The first number after ####, else after the last \\boxed{, else the last one; a next question
    does not count."""
    text = text.partition("\nQuestion:")[0]
    _, mark, answer = text.partition("####")
    if not mark:
        _, mark, answer = text.rpartition("\\boxed{")
    numbers = NUMBER.findall(answer.partition("\n")[0] if mark else text)
    if not numbers:
        return None
    return _number(numbers[0] if mark else numbers[-1])


def _number(text: str) -> str | None:
    """A number in one spelling: $1,234.00 -> 1234; None for what is none."""
    text = text.strip()
    return (
        f"{float(text.replace('$', '').replace(',', '')):.10g}" if NUMBER.fullmatch(text) else None
    )


@dataclass(frozen=True)
class BadLine:
    """A line of a file that is no request."""

    number: int  # from 1; in a JSON list, of the entry
    reason: str


@dataclass(frozen=True)
class Workload:
    """Requests under a name."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    skipped: tuple[BadLine, ...] = ()
    notes: tuple[str, ...] = field(default=())  # where it comes from, as a person should know

    def firsts(self, count: int) -> Workload:
        """A workload of the first `count` requests of every task."""
        of_task: dict[str, list[WorkloadRequest]] = {}
        for request in self.requests:
            of_task.setdefault(request.task, []).append(request)
        chosen = {request.id for requests in of_task.values() for request in requests[:count]}
        return replace(
            self, requests=tuple(request for request in self.requests if request.id in chosen)
        )


def listing(head: str, items: Sequence[str], remedy: str) -> str:
    """A message that lists the first few items."""
    shown = [item.rstrip(".") for item in items[:SHOWN]]
    more = [f"and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    listed = ";\n".join(f"  {item}" for item in [*shown, *more])
    return (
        f"{head}\n{listed}{'' if listed.endswith('?') else '.'}\n{remedy[:1].upper()}{remedy[1:]}"
    )


def identity(
    verb: str, options: Options, workload: Workload, *, chat_template: bool, **more: Any
) -> dict[str, Any]:
    """The facts that an interrupted run must share with the one that continues it."""
    return {
        "verb": verb,
        **more,
        "models": asdict(options),
        "chat template": chat_template,
        "workload": _digest(workload),
        "versions": versions(),
    }


def _digest(workload: Workload) -> str:
    """Name and prompts, for knowing a workload again."""
    asked = "\n".join(
        f"{request.id} {request.prompt} {request.messages} {request.later or ''}"
        for request in workload.requests
    )
    return f"{workload.name} {hashlib.sha256(asked.encode()).hexdigest()[:12]}"
