"""One tool call in JSON, read letter by letter: its name as soon as it is known, its arguments as
they are written."""

from __future__ import annotations

from outrider.text import Brackets
from outrider.wellformed import is_text, parsed_json

ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """Reads {"name": "f", "arguments": {...}}, keys in any order. With `name` given, the arguments'
    object alone."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.done = self.broken = False  # complete; no JSON, or no call
        self.has_arguments = name is not None
        self._alone = name is not None
        self._key = "arguments" if name is not None else ""
        self._consumed: list[str] = []
        self._new: list[str] = []  # arguments not handed over yet
        self._begin("start" if name is None else "value")

    @property
    def raw(self) -> str:
        """Everything consumed."""
        return "".join(self._consumed)

    def push(self, text: str) -> str:
        """Read on; returns what stands after the call."""
        at = 0
        while at < len(text) and not (self.done or self.broken):
            at = getattr(self, "_" + self._state)(text, at)
        self._consumed.append(text[:at])
        return text[at:]

    def take(self) -> str:
        """Arguments, as JSON text, that came since it was asked last."""
        new = "".join(self._new)
        self._new = []
        return new

    def _begin(self, state: str) -> None:
        """Go on to a key or a value. Each state's method reads from a place in a text and returns
        where it stopped."""
        self._state = state
        self._brackets = Brackets()
        self._first = ""  # letter of the key or value being read
        self._parts: list[str] = []  # of the same

    def _start(self, text: str, at: int) -> int:
        self._state = "next" if text[at] == "{" else "start"
        self.broken = text[at] != "{" and not text[at].isspace()
        return at + 1

    def _next(self, text: str, at: int) -> int:
        """Between two members."""
        if text[at] == '"':
            self._begin("member")
            return at
        if text[at] == "}":
            self._finish()
        else:
            self.broken = not (text[at].isspace() or text[at] == ",")
        return at + 1

    def _member(self, text: str, at: int) -> int:
        """Inside a key."""
        end = self._closing(text, at)
        self._parts.append(text[at:end])
        if end is None:
            return len(text)
        self._key = str(self._loads())
        self._state = "colon"
        return end

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._begin("value")
            self.has_arguments = self.has_arguments or self._key in ARGUMENTS
        else:
            self.broken = not text[at].isspace()
        return at + 1

    def _value(self, text: str, at: int) -> int:
        if not self._first and text[at].isspace():
            return at + 1
        self._first = self._first or text[at]
        is_scalar = self._first not in '"{['
        end = (
            next((n for n in range(at, len(text)) if text[n] in ",}]"), None)
            if is_scalar
            else self._closing(text, at)
        )
        self._parts.append(text[at:end])
        if self._key in ARGUMENTS and self._first in "{[":
            self._new.append(text[at:end])
        if end is None:
            return len(text)
        if is_scalar and (text[end] == "]" or self._first == "}"):
            self.broken = True
            return end + 1
        self._end_value()
        return self._next(text, end) if is_scalar else end

    def _closing(self, text: str, at: int) -> int | None:
        """The place after the letter that closes the key or value."""
        return next((n + 1 for n in range(at, len(text)) if self._brackets.closes(text[n])), None)

    def _end_value(self) -> None:
        self._state = "next"
        value = self._loads()
        if self._key == "name":
            self.name = value if isinstance(value, str) and is_text(value) else None
        elif self._key in ARGUMENTS and self._first not in "{[":
            # arguments as a text of JSON; null for none
            self._new.append(value if isinstance(value, str) and is_text(value) else "{}")
        if self._alone:
            self.done = not self.broken

    def _finish(self) -> None:
        self.broken = self.name is None
        self.done = not self.broken

    def _loads(self) -> object:
        try:
            return parsed_json("".join(self._parts))
        except ValueError:  # no JSON; nested deeper than any argument is
            self.broken = True
            return None
