"""Calls written as JSON: behind a mark (Hermes, Mistral), or in place of an answer (Llama 3).

Text is held back while it could still be the beginning of a mark, and white space before one is nobody's content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from outrider.serve.tools_formats import ToolFormat
from outrider.serve.tools_json import CallScanner

Event = tuple[Literal["content", "name", "arguments"], str]  # "name" begins a call

NAMED = re.compile(r"([A-Za-z0-9_.-]+)(?:\[ARGS\])?(?=\{)")  # Mistral's newer way: the name stands before the arguments
HALF_NAMED = re.compile(r"[A-Za-z0-9_.-]+(?:\[(?:A(?:R(?:G(?:S\]?)?)?)?)?)?")
PYTHON_TAG = "<|python_tag|>"


class _JsonCalls:
    """What both have in common: a buffer, and at most one call being read."""

    def __init__(self) -> None:
        self._buffer = ""
        self._scanner: CallScanner | None = None
        self._told = False  # the name of the call being read
        self._num_calls = 0
        self._skipped = ""  # what was taken as the way to a call since the last one; content if none comes

    @property
    def is_complete(self) -> bool:
        return self._scanner is None

    def push(self, text: str) -> list[Event]:
        """What the text adds."""
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._advance(events):
            pass
        return events

    def end(self) -> list[Event]:
        """What was held back, where it is content."""
        unread = "" if self._scanner is None or self._told else self._scanner.raw
        text = self._skipped + unread + self._buffer
        self._buffer = self._skipped = ""
        if self._scanner is not None and not self._told:
            self._scanner = None
        return [("content", text)] if text.strip() or (text and not self._num_calls) else []

    def _advance(self, events: list[Event]) -> bool:
        """One thing more; False when that takes more text."""
        raise NotImplementedError

    def _is_call(self, name: str) -> bool:
        return True

    def _scan(self, events: list[Event]) -> bool:
        """Read on in a call."""
        scanner = self._scanner
        assert scanner is not None
        self._buffer = scanner.push(self._buffer)
        if not self._told and scanner.name is not None and (scanner.has_arguments or scanner.done):
            if not self._is_call(scanner.name):
                scanner.broken = True
            else:
                events.append(("name", scanner.name))
                self._told, self._skipped, self._num_calls = True, "", self._num_calls + 1
        if self._told and (new := scanner.take()):
            events.append(("arguments", new))
        if scanner.broken:
            self._give_up(events, "" if self._told else scanner.raw)
            return True
        if scanner.done:
            if not scanner.has_arguments:
                events.append(("arguments", "{}"))
            self._scanner = None
        return scanner.done

    def _give_up(self, events: list[Event], raw: str) -> None:
        """That was no call."""
        text, self._scanner, self._skipped = self._skipped + raw, None, ""
        if text:
            events.append(("content", text))

    def _begin(self, name: str | None = None) -> None:
        self._scanner, self._told = CallScanner(name), False


class MarkedCalls(_JsonCalls):
    """`opening` call ... (`closing`), with content around."""

    def __init__(self, form: ToolFormat) -> None:
        super().__init__()
        self._form = form
        self._inside = False

    def _advance(self, events: list[Event]) -> bool:
        if self._scanner is not None:
            return self._scan(events)
        return self._next_call(events) if self._inside else self._content(events)

    def _give_up(self, events: list[Event], raw: str) -> None:
        self._inside = False
        super()._give_up(events, raw)

    def _content(self, events: list[Event]) -> bool:
        before, found, rest = self._buffer.partition(self._form.opening)
        if found:
            if before.strip():
                events.append(("content", before.rstrip()))
            self._buffer, self._inside, self._skipped = rest, True, found
            return True
        held = _held(self._buffer, self._form.opening)
        if held < len(self._buffer):
            events.append(("content", self._buffer[: len(self._buffer) - held]))
            self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _next_call(self, events: list[Event]) -> bool:
        """Between a mark and a call, or behind a call."""
        marks = [mark for mark in (self._form.opening, self._form.closing) if mark]
        self._buffer = self._buffer.lstrip(" \t\r\n" if self._form.closing else " \t\r\n,;]")
        for mark in marks:
            if self._buffer.startswith(mark):
                self._buffer, self._inside = self._buffer[len(mark) :], mark == self._form.opening
                return True
        if any(mark.startswith(self._buffer) for mark in marks):
            return False
        if self._buffer[0] == "{":
            self._begin()
            return True
        if not self._form.closing and self._buffer[0] == "[":
            self._skipped, self._buffer = self._skipped + "[" if self._skipped else "", self._buffer[1:]
            return True
        if not self._form.closing and (named := NAMED.match(self._buffer)):
            self._buffer = self._buffer[named.end() :]
            self._begin(named[1])
            return True
        if not self._form.closing and HALF_NAMED.fullmatch(self._buffer):
            return False
        self._give_up(events, "")
        return True


class BareCalls(_JsonCalls):
    """The whole answer is calls of known tools, or there are none in it."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._is_content = False

    def _is_call(self, name: str) -> bool:
        return name in self._names and self._scanner is not None and self._scanner.has_arguments

    def _give_up(self, events: list[Event], raw: str) -> None:
        self._is_content = True
        super()._give_up(events, raw)

    def _advance(self, events: list[Event]) -> bool:
        if self._scanner is not None:
            return self._scan(events)
        if self._is_content:
            events.append(("content", self._buffer))
            self._buffer = ""
            return False
        rest = self._buffer.lstrip(" \t\r\n;," if self._num_calls else " \t\r\n").removeprefix(PYTHON_TAG).lstrip()
        if not rest or PYTHON_TAG.startswith(rest):
            return False
        if rest[0] != "{":
            self._is_content = True
            return True
        if not self._num_calls:
            self._skipped = self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        self._begin()
        return True


def _held(text: str, mark: str) -> int:
    """How many of the last letters could belong to a mark with white space before it."""
    for start in range(max(0, len(text) - len(mark)), len(text)):
        if mark.startswith(text[start:]):
            return len(text) - len(text[:start].rstrip())
    return len(text) - len(text.rstrip())
