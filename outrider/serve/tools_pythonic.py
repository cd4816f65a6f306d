"""Calls written as Python: [f(a=1, b="x"), g()]. The whole answer is such a list of known tools, or there are none in it.

A call is told when it is complete: its arguments become JSON, which Python's syntax is not.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from outrider.serve.tools_calls import Event

BEGIN = re.compile(r"\s*\[\s*([A-Za-z_][\w.-]*)\(")
HALF = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.-]*)?)?")
NAMES = {"true": True, "false": False, "null": None}  # what JSON calls them


class PythonicCalls:
    """See the module docstring."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._buffer = ""
        self._state = "undecided"  # then "calls", then "content"
        self._num_calls = 0

    @property
    def is_complete(self) -> bool:
        return self._state != "calls"

    def push(self, text: str) -> list[Event]:
        """What the text adds."""
        self._buffer += text
        if self._state == "undecided":
            begin = BEGIN.match(self._buffer)
            if begin is None and HALF.fullmatch(self._buffer):
                return []
            is_call = begin is not None and begin[1] in self._names
            self._state = "calls" if is_call else "content"
            self._buffer = self._buffer.lstrip()[1:] if is_call else self._buffer
        events: list[Event] = []
        while self._state == "calls" and self._next(events):
            pass
        return events + self._content() if self._state == "content" else events

    def end(self) -> list[Event]:
        """What was held back, where it is content."""
        if self._state == "calls" and self._num_calls:
            return []  # a call that breaks off: it was not told, and is no content either
        self._buffer = ("[" if self._state == "calls" else "") + self._buffer
        self._state = "content"
        return self._content()

    def _content(self) -> list[Event]:
        text, self._buffer = self._buffer, ""
        return [("content", text)] if text.strip() or (text and not self._num_calls) else []

    def _next(self, events: list[Event]) -> bool:
        """One call more; False when that takes more text."""
        self._buffer = self._buffer.lstrip(" \t\r\n,")
        if self._buffer.startswith("]"):
            self._buffer, self._state = self._buffer[1:], "content"
            return False
        length = _length(self._buffer)
        if length is None:
            return False
        call = _parsed(self._buffer[:length])
        if call is None:
            self._buffer, self._state = ("" if self._num_calls else "[") + self._buffer, "content"
            return False
        self._buffer, self._num_calls = self._buffer[length:], self._num_calls + 1
        events += [("name", call[0]), ("arguments", json.dumps(call[1], ensure_ascii=False))]
        return True


def _length(text: str) -> int | None:
    """Letters of the call that `text` begins with; None while it is not complete."""
    depth, quote, escaped = 0, "", False
    for place, letter in enumerate(text):
        if quote:
            if letter == quote and not escaped:
                quote = ""
            escaped = letter == "\\" and not escaped
        elif letter in "\"'":
            quote, escaped = letter, False
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if depth == 0:
                return place + 1
    return None


def _parsed(text: str) -> tuple[str, dict[str, Any]] | None:
    """(name, arguments) of one call; None where it is none."""
    name, _, rest = text.partition("(")  # tools may be called what Python would not call them
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        return name.strip(), {str(word.arg): _value(word.value) for word in call.keywords if word.arg is not None}
    except (SyntaxError, ValueError):
        return None


def _value(node: ast.expr) -> Any:
    """A literal, in Python's words or JSON's. Raises ValueError."""
    match node:
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case _:
            return ast.literal_eval(node)
