"""Calls written as Python: [f(a=1, b="x"), g()]. The whole answer is such a list of known tools, or
there are none in it.

A call is reported when it is complete, because its arguments must become JSON.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import Any

from outrider.serve.tools.formats import WORD
from outrider.serve.tools.text import Event, Pieces
from outrider.serve.tools.values import UNREADABLE, as_json
from outrider.text import Brackets

SPACES = " \t\r\n"  # as in the grammar of strict tools
BEGIN = re.compile(rf"[{SPACES}]*\[[{SPACES}]*({WORD}+)\(")
HALF = re.compile(rf"[{SPACES}]*(?:\[[{SPACES}]*{WORD}*)?")
NAMES = {"true": True, "false": False, "null": None}  # what JSON calls them


class PythonicCalls(Pieces):
    """Reads tool calls that are written as a Python list of calls."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._state = "undecided"  # then "calls" and "after", then "content"
        self._begin()

    def _begin(self) -> None:
        """The next call."""
        self._brackets = Brackets("([{", ")]}", "\"'")
        self._read = 0

    @property
    def is_complete(self) -> bool:
        return self._state != "calls"

    def end(self) -> list[Event]:
        """The text that was held back, where it is content. A call that breaks off was not
        reported, and is no content either."""
        return [] if self._state == "calls" and self._num_calls else self._rest()

    def _advance(self, events: list[Event]) -> bool:
        if self._state == "undecided":
            return self._decide()
        if self._state == "calls":
            return self._next(events)
        if self._state == "after" and not self._buffer.strip():
            return False
        self._state = "content"
        events.append(("content", self._buffer))
        self._buffer = ""
        return False

    def _decide(self) -> bool:
        begin = BEGIN.match(self._buffer)
        if begin is None and HALF.fullmatch(self._buffer):
            return False
        self._state = "calls" if begin is not None and begin[1] in self._names else "content"
        if begin is not None and self._state == "calls":
            self._skipped = self._buffer[: begin.start(1)]
            self._buffer = self._buffer[begin.start(1) :]
        return True

    def _next(self, events: list[Event]) -> bool:
        """One call more; False when that takes more text."""
        self._pass(len(self._buffer) - len(self._buffer.lstrip(SPACES + ",")))
        if self._buffer.startswith("]"):
            self._buffer = self._buffer[1:]
            self._state = "after"
            return True
        ends = (
            at + 1
            for at in range(self._read, len(self._buffer))
            if self._brackets.closes(self._buffer[at])
        )
        length = next(ends, None)
        if length is None:
            self._read = len(self._buffer)
            return False
        self._begin()
        call = _parsed(self._buffer[:length])
        if call is None:
            self._state = "content"
            self._give_up(events)
            return True
        self._buffer = self._buffer[length:]
        self._skipped = ""
        self._num_calls = self._num_calls + 1
        events += [("name", call[0]), ("arguments", call[1])]
        return True


def _parsed(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of one call; None where it is none."""
    name, _, rest = text.partition("(")  # tools may be called what Python would not call them
    if not re.fullmatch(f"{WORD}+", name.rstrip()):
        return None
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or call.args
            or any(word.arg is None for word in call.keywords)
        ):
            return None
        return name.rstrip(), as_json({str(word.arg): _value(word.value) for word in call.keywords})
    except UNREADABLE:
        return None


def _value(node: ast.expr) -> Any:
    """A literal, in Python's words or JSON's. Raises ValueError."""
    match node:
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {
                str(_value(key)): _value(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case _:
            return ast.literal_eval(node)
