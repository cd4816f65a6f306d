"""Calls written with tags (Qwen3-Coder, GLM): the arguments become JSON as they are written.

What is only ever a text streams letter by letter; other values wait for their end, for until then
nobody knows what they are. As in the models' own parsers, what stands between two tags is skipped.
A parameter that is given twice counts once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from outrider.serve.tools.formats import WORD, Tags, ToolFormat
from outrider.serve.tools.text import Event, Pieces, first, half, tail
from outrider.serve.tools.values import TEXT, as_json, converted, parameter, types_of

# JSON with strings in it, in which an end tag is no end
NESTED = frozenset(["object", "array", "null"])


class TaggedCalls(Pieces):
    """For one answer. `schemas`: of the tools' parameters, by name."""

    def __init__(
        self, form: ToolFormat, tags: Tags, schemas: Mapping[str, Mapping[str, Any]]
    ) -> None:
        super().__init__()
        self._form = form
        self._tags = tags
        self._schemas = schemas
        before, after = tags.name
        # some models leave the first away
        self._marks = tuple(mark for mark in (form.opening, before) if mark)
        self._name = re.compile(
            rf"\s*({WORD}+)\s*{re.escape(after)}\s*(?={re.escape(tags.key[0])}|{re.escape(tags.end)})"
        )
        then = f"{half(tags.key[0])}|{half(tags.end)}"
        self._half_name = re.compile(rf"\s*{WORD}*\s*(?:{re.escape(after)}\s*(?:{then}))?")
        self._step: Callable[[list[Event]], bool] = self._content
        self._call = ""  # being read
        self._keys: set[str] = set()
        self._key_read = ""
        self._types = TEXT  # of the value being read
        self._is_streamed = False  # this value, letter by letter
        self._is_fresh = False  # no letter of this value was seen

    @property
    def is_complete(self) -> bool:
        return not self._call

    def end(self) -> list[Event]:
        """The text that was held back, where it is content or belongs to a text that breaks off."""
        if self._step == self._behind and self._form.closing.startswith(self._buffer.strip()):
            self._buffer = ""  # half of the closing mark
        if not self._call:
            return self._rest()
        text = self._bare(self._buffer, is_last=False)
        self._buffer = ""
        return [("arguments", _escaped(text))] if text and self._is_streamed else []

    def _advance(self, events: list[Event]) -> bool:
        return self._step(events)

    def _give_up(self, events: list[Event], raw: str = "") -> None:
        self._step = self._content
        super()._give_up(events, raw)

    def _content(self, events: list[Event]) -> bool:
        mark = self._up_to(self._marks, events)
        if mark:
            self._step = (
                self._opened if mark == self._form.opening and self._tags.name[0] else self._named
            )
        return bool(mark)

    def _opened(self, events: list[Event]) -> bool:
        """After the mark, before the tag with the name."""
        tag = self._tags.name[0]
        rest = self._buffer.lstrip()
        if rest.startswith(tag):
            self._pass(len(self._buffer) - len(rest) + len(tag))
            self._step = self._named
        elif tag.startswith(rest):
            return False
        else:
            self._give_up(events)
        return True

    def _named(self, events: list[Event]) -> bool:
        """The name, with a tag after it: else it is none."""
        match = self._name.match(self._buffer)
        if match is None:
            if self._half_name.fullmatch(self._buffer):
                return False
            self._give_up(events)
            return True
        is_marked = self._form.opening in self._skipped
        if not is_marked and match[1] not in self._schemas:
            self._give_up(events)
            return True
        self._buffer = self._buffer[match.end() :]
        self._call = match[1]
        self._skipped = ""
        self._keys = set()
        self._num_calls += 1
        events += [("name", match[1]), ("arguments", "{")]
        self._step = self._between
        return True

    def _between(self, events: list[Event]) -> bool:
        """After the name or a value."""
        key = self._tags.key[0]
        end = self._tags.end
        start, mark = first(self._buffer, (key, end, self._form.closing, self._form.opening))
        if not mark:
            return False
        if mark == key:
            self._step = self._key
        else:
            events.append(("arguments", "}"))
            self._call = ""
            self._step = self._behind
        self._buffer = self._buffer[start + len(mark) if mark in (key, end) else start :]
        return True

    def _key(self, events: list[Event]) -> bool:
        key, name, rest = self._buffer.partition(self._tags.key[1])
        if not name:
            return False
        self._buffer = rest
        self._key_read = key.strip()
        self._step = self._before_value
        return True

    def _before_value(self, events: list[Event]) -> bool:
        opening = self._tags.value[0]
        if opening:
            start, mark = first(self._buffer, (opening, self._tags.key[0], self._tags.end))
            if not mark:
                return False
            self._buffer = self._buffer[start + len(mark) if mark == opening else start :]
            if mark != opening:  # no value
                self._step = self._between
                return True
        if self._key_read in self._keys:
            self._step = self._repeated
            return True
        schema = self._schemas.get(self._call) or {}
        self._types = types_of(parameter(schema, self._key_read), schema)
        self._is_streamed = self._types == TEXT
        self._is_fresh = True
        comma = ", " if self._keys else ""
        quote = '"' if self._is_streamed else ""
        events.append(("arguments", f"{comma}{as_json(self._key_read)}: {quote}"))
        self._keys.add(self._key_read)
        self._step = self._value
        return True

    def _value(self, events: list[Event]) -> bool:
        start, mark = first(self._buffer, self._tags.ends)
        while mark and self._types <= NESTED and _in_quotes(self._buffer[:start]):
            start, mark = first(self._buffer, self._tags.ends, start + 1)
        if not mark and not self._is_streamed:
            return False
        length = start if mark else len(self._buffer) - self._kept()
        text = self._bare(self._buffer[:length], is_last=bool(mark))
        self._buffer = self._buffer[length:]
        self._is_fresh = self._is_fresh and not length
        quote = '"' if mark else ""
        text = (
            _escaped(text) + quote if self._is_streamed else as_json(converted(text, self._types))
        )
        if text:
            events.append(("arguments", text))
        if mark:
            self._end_value(mark)
        return bool(mark)

    def _bare(self, text: str, *, is_last: bool) -> str:
        """The next part of a value, without line ends that belong to the tags."""
        if self._tags.lined and self._is_fresh:
            text = text.removeprefix("\n")
        return text.removesuffix("\n") if self._tags.lined and is_last else text

    def _repeated(self, events: list[Event]) -> bool:
        """A value of a parameter that has one."""
        start, mark = first(self._buffer, self._tags.ends)
        if mark:
            self._buffer = self._buffer[start:]
            self._end_value(mark)
        return bool(mark)

    def _end_value(self, mark: str) -> None:
        if mark == self._tags.value[1]:
            self._buffer = self._buffer[len(mark) :]
        self._is_streamed = False
        self._step = self._between

    def _kept(self) -> int:
        """Letters at the end of the buffer that may belong to the end of the value."""
        held = tail(self._buffer, self._tags.ends)
        before = self._buffer[: len(self._buffer) - held]
        return held + (1 if self._tags.lined and before.endswith("\n") else 0)

    def _behind(self, events: list[Event]) -> bool:
        """After a call: its closing mark, and what may follow."""
        if self._tags.end == self._form.closing:
            self._step = self._content
            return True
        rest = self._buffer.lstrip()
        if rest.startswith(self._form.closing):
            self._buffer = rest[len(self._form.closing) :]
            self._step = self._content
        elif any(mark.startswith(rest) for mark in (self._form.closing, *self._marks)):
            return False
        else:
            self._buffer = rest
            self._step = self._content
        return True


def _in_quotes(text: str) -> bool:
    """Whether JSON breaks off inside of a string."""
    return (
        text.lstrip()[:1] in ("[", "{")
        and re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1
    )


def _escaped(text: str) -> str:
    """The text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
