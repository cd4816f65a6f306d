"""What is finished, in the journal where there is one: answers one by one, counters window by window."""

from __future__ import annotations

from typing import Any

from outrider.lab.journal import Journal
from outrider.lab.server.counters import Window
from outrider.lab.server.types import Answer, Level

SEPARATOR = "|"  # of a key: "server", kind, label, level, and what it is about


class Kept:
    """Finished work by server and level."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._new: dict[str, Any] = {}

    def answers(self, label: str, level: Level) -> list[Answer]:
        return [Answer.model_validate(content) for content in self._find("answer", label, level)]

    def windows(self, label: str, level: Level) -> list[Window]:
        return [Window.model_validate(content) for content in self._find("counters", label, level)]

    def add_answer(self, label: str, level: Level, answer: Answer) -> None:
        self._add(_key("answer", label, level, answer.id), answer.model_dump(mode="json"))

    def add_window(self, label: str, level: Level, window: Window) -> None:
        self._add(_key("counters", label, level, str(window.numbers)), window.model_dump(mode="json"))

    def _add(self, key: str, content: Any) -> None:
        self._new[key] = content
        if self._journal is not None:
            self._journal.add(key, content)

    def _find(self, kind: str, label: str, level: Level) -> list[Any]:
        start = _key(kind, label, level, "")
        if self._journal is None:
            return [content for key, content in self._new.items() if key.startswith(start)]
        return [self._journal[key] for key in self._journal if key.startswith(start)]


def _key(kind: str, label: str, level: Level, name: str) -> str:
    return SEPARATOR.join(("server", kind, label, level.label, name))
