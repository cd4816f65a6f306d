"""One tool call in JSON, read letter by letter: its name as soon as it is known, its arguments as they are written."""

from __future__ import annotations

import json

from outrider.text import Brackets
from outrider.wellformed import is_text

ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """Reads {"name": "f", "arguments": {...}}, keys in any order. With `name` given, the arguments' object alone."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.raw = ""  # everything consumed
        self.done = self.broken = False  # complete; no JSON, or no call
        self.has_arguments = name is not None
        self._alone = name is not None
        self._state = "start" if name is None else "value"
        self._key = "arguments" if name is not None else ""
        self._text = ""  # of the key or value being read
        self._brackets = Brackets()
        self._new = ""  # arguments not handed over yet

    def push(self, text: str) -> str:
        """Read on; returns what stands behind the call."""
        for index, letter in enumerate(text):
            if self.done or self.broken:
                return text[index:]
            self.raw += letter
            getattr(self, "_" + self._state)(letter)
        return ""

    def take(self) -> str:
        """Arguments, as JSON text, that came since it was asked last."""
        new, self._new = self._new, ""
        return new

    def _start(self, letter: str) -> None:
        self._state = "next" if letter == "{" else "start"
        self.broken = letter != "{" and not letter.isspace()

    def _next(self, letter: str) -> None:
        """Between two members."""
        if letter == '"':
            self._state, self._text, self._brackets = "member", "", Brackets()
            self._member(letter)
        elif letter == "}":
            self._finish()
        else:
            self.broken = not (letter.isspace() or letter == ",")

    def _member(self, letter: str) -> None:
        """Inside a key."""
        self._text += letter
        if self._brackets.closes(letter):
            self._key, self._state = str(self._loads(self._text)), "colon"

    def _colon(self, letter: str) -> None:
        if letter == ":":
            self._state, self._text, self._brackets = "value", "", Brackets()
            self.has_arguments = self.has_arguments or self._key in ARGUMENTS
        else:
            self.broken = not letter.isspace()

    def _value(self, letter: str) -> None:
        is_scalar = self._text[:1] not in ("", '"', "{", "[")
        if is_scalar and letter in ",}":
            self._end_value()
            self._next(letter)
            return
        if not self._text and letter.isspace():
            return
        self._text += letter
        if self._key in ARGUMENTS and self._text[0] in "{[":
            self._new += letter
        if self._brackets.closes(letter):
            self.broken = self._brackets.depth < 0
            if not self.broken:
                self._end_value()

    def _end_value(self) -> None:
        self._state = "next"
        value = self._loads(self._text)
        if self._key == "name":
            self.name = value if isinstance(value, str) and is_text(value) else None
        elif self._key in ARGUMENTS and self._text[0] not in "{[":
            # arguments as a text of JSON; null for none
            self._new += value if isinstance(value, str) and is_text(value) else "{}"
        if self._alone:
            self.done = not self.broken

    def _finish(self) -> None:
        self.broken = self.name is None
        self.done = not self.broken

    def _loads(self, text: str) -> object:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):  # no JSON; nested deeper than any argument is
            self.broken = True
            return None
