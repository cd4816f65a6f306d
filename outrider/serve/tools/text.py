"""Text that arrives in pieces, looked through for marks: what the readers of tool calls have in
common.

White space before a mark is nobody's content, and what could still become a mark is held back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Event = tuple[Literal["content", "name", "arguments"], str]  # "name" begins a call


class Pieces:
    """A buffer, and what was taken as the way to a call: content after all, if none comes."""

    def __init__(self) -> None:
        self._buffer = ""
        self._skipped = ""
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        """The pieces that the text adds."""
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._advance(events):
            pass
        return events

    def _advance(self, events: list[Event]) -> bool:
        """One thing more; False when that takes more text."""
        raise NotImplementedError

    def _pass(self, length: int) -> None:
        """Go on by this many letters, which are content if no call comes."""
        if self._skipped:
            self._skipped += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _give_up(self, events: list[Event], raw: str = "") -> None:
        """That was no call."""
        text = self._skipped + raw
        self._skipped = ""
        if text:
            events.append(("content", text))

    def _up_to(self, marks: Sequence[str], events: list[Event]) -> str:
        """Tell content up to the first mark, and go after it; "" while there is none."""
        position, mark = first(self._buffer, marks)
        before = (
            self._buffer[:position].rstrip()
            if mark
            else self._buffer[: len(self._buffer) - held(self._buffer, marks)]
        )
        if before:
            events.append(("content", before))
        if mark:
            self._skipped = self._buffer[len(before) : position + len(mark)]
        self._buffer = self._buffer[position + len(mark) if mark else len(before) :]
        return mark

    def _rest(self, unread: str = "") -> list[Event]:
        """The text that was held back, at the end of the answer. White space after a call is not
        content."""
        text = self._skipped + unread + self._buffer
        self._buffer = self._skipped = ""
        return [("content", text)] if text.strip() or (text and not self._num_calls) else []


def first(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str]:
    """(position, mark) of the mark that comes first, from `start` on; (-1, "") where there is none."""
    positions = [(position, mark) for mark in marks if (position := text.find(mark, start)) >= 0]
    return min(positions, default=(-1, ""))


def tail(text: str, marks: Sequence[str]) -> int:
    """How many of the last letters may be the beginning of a mark."""
    return max(
        (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])),
        default=0,
    )


def held(text: str, marks: Sequence[str]) -> int:
    """The length of a mark's beginning at the end of a text, with white space before."""
    return len(text) - len(text[: len(text) - tail(text, marks)].rstrip())


def half(text: str) -> str:
    """A regular expression for every beginning of a text, none of it and all of it included."""
    return "".join(f"(?:{re.escape(letter)}" for letter in text) + ")?" * len(text)
