"""Calls written as JSON: after a mark (Hermes, DeepSeek, Mistral), or in place of an answer (Llama
3)."""

from __future__ import annotations

from collections.abc import Collection

from outrider.serve.tools.formats import PYTHON_TAG, ToolFormat
from outrider.serve.tools.json_calls import CallScanner
from outrider.serve.tools.text import Event, Pieces

SPACES = " \t\r\n"


class _JsonCalls(Pieces):
    """The base of both: at most one call being read."""

    def __init__(self) -> None:
        super().__init__()
        self._scanner: CallScanner | None = None
        self._is_named = False  # the name of the call being read

    @property
    def is_complete(self) -> bool:
        return self._scanner is None

    def end(self) -> list[Event]:
        """The text that was held back, where it is content."""
        unread = "" if self._scanner is None or self._is_named else self._scanner.raw
        if not self._is_named:
            self._scanner = None
        return self._rest(unread)

    def _is_call(self, name: str) -> bool:
        return True

    def _scan(self, events: list[Event]) -> bool:
        """Read on in a call."""
        scanner = self._scanner
        assert scanner is not None
        self._buffer = scanner.push(self._buffer)
        if (
            not self._is_named
            and scanner.name is not None
            and (scanner.has_arguments or scanner.done)
        ):
            if not self._is_call(scanner.name):
                scanner.broken = True
            else:
                events.append(("name", scanner.name))
                self._is_named = True
                self._skipped = ""
                self._num_calls = self._num_calls + 1
        if self._is_named and (new := scanner.take()):
            events.append(("arguments", new))
        if scanner.broken:
            self._scanner = None
            self._give_up(events, "" if self._is_named else scanner.raw)
            return True
        if scanner.done:
            if not scanner.has_arguments:
                events.append(("arguments", "{}"))
            self._scanner = None
        return scanner.done

    def _begin(self, name: str | None = None) -> None:
        self._scanner = CallScanner(name)
        self._is_named = False


class MarkedCalls(_JsonCalls):
    """`opening` call ... (`closing`), with content around."""

    def __init__(self, form: ToolFormat) -> None:
        super().__init__()
        self._form = form
        self._marks = tuple(mark for mark in (form.opening, form.closing, *form.around) if mark)
        # without a closing mark, calls may stand in a list
        self._between = SPACES if form.closing else SPACES + ",;]"
        self._inside = False

    def _advance(self, events: list[Event]) -> bool:
        if self._scanner is not None:
            return self._scan(events)
        if not self._inside:
            self._inside = bool(self._up_to([self._form.opening], events))
            return self._inside
        return self._next_call(events)

    def end(self) -> list[Event]:
        rest = self._buffer.strip()
        if (
            self._inside
            and not self._skipped
            and any(mark.startswith(rest) for mark in (self._form.closing, *self._form.around))
        ):
            self._buffer = ""  # half of a mark after a call
        return super().end()

    def _give_up(self, events: list[Event], raw: str = "") -> None:
        self._inside = False
        super()._give_up(events, raw)

    def _next_call(self, events: list[Event]) -> bool:
        """Between a mark and a call, or after a call."""
        self._pass(len(self._buffer) - len(self._buffer.lstrip(self._between)))
        if not self._buffer:
            return False
        for mark in self._marks:
            if self._buffer.startswith(mark):
                self._take(mark, events)
                return True
        if any(mark.startswith(self._buffer) for mark in self._marks):
            return False
        if not self._form.closing and self._buffer[0] == "[":
            self._pass(1)
        elif self._buffer[0] == "{":
            self._begin()
        elif (head := self._form.head) and (named := head.whole.match(self._buffer)):
            self._skipped += self._buffer[: named.end()]
            self._buffer = self._buffer[named.end() :]
            self._begin(named[1])
        elif head and head.part.fullmatch(self._buffer):
            return False
        else:
            self._give_up(events)
        return True

    def _take(self, mark: str, events: list[Event]) -> None:
        """Go after a mark."""
        self._pass(len(mark))
        if mark == self._form.opening:
            self._skipped = self._skipped or mark
        elif mark == self._form.closing and self._skipped:
            self._give_up(events)  # nothing stood between the two
        elif mark == self._form.closing:
            self._inside = False


class BareCalls(_JsonCalls):
    """The whole answer is calls of known tools, or there are none in it."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._is_content = False

    def _is_call(self, name: str) -> bool:
        return name in self._names and self._scanner is not None and self._scanner.has_arguments

    def _give_up(self, events: list[Event], raw: str = "") -> None:
        self._is_content = True
        super()._give_up(events, raw)

    def _advance(self, events: list[Event]) -> bool:
        if self._scanner is not None:
            return self._scan(events)
        if self._is_content:
            events.append(("content", self._buffer))
            self._buffer = ""
            return False
        rest = (
            self._buffer.lstrip(SPACES + ";," if self._num_calls else SPACES)
            .removeprefix(PYTHON_TAG)
            .lstrip(SPACES)
        )
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
