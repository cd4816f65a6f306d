"""From an answer's text, as it arrives, to OpenAI's deltas: content, and tool calls piece by piece.

What cannot be read as a call is content: a client then at least sees the model's text. Only a call
that breaks off after its name was reported stays as it is, with incomplete arguments and the
engine's own finish reason ("length").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from outrider.serve.tools.calls import BareCalls, MarkedCalls
from outrider.serve.tools.formats import ToolFormat
from outrider.serve.tools.pythonic import PythonicCalls
from outrider.serve.tools.tagged import TaggedCalls
from outrider.serve.tools.text import Event


class Calls(Protocol):
    """Reads one format."""

    @property
    def is_complete(self) -> bool:
        """Whether no call is incomplete."""

    def push(self, text: str) -> list[Event]: ...

    def end(self) -> list[Event]: ...


class ToolReader:
    """For one answer."""

    def __init__(
        self,
        form: ToolFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        parallel: bool,
        called: str = "tool_calls",
    ) -> None:
        """`schemas`: of the tools' parameters, by the tools' names; without any, everything is
        content. `parallel`: else calls after the first are left out."""
        self._form = form
        self._calls = _calls(form, schemas) if schemas else None
        self._parallel = parallel
        self._called = called
        self._index = -1

    @property
    def finish_reason(self) -> str | None:
        """Instead of the engine's, once the answer has ended."""
        return (
            self._called
            if self._index >= 0 and self._calls is not None and self._calls.is_complete
            else None
        )

    def push(self, text: str) -> list[dict[str, Any]]:
        """Deltas for newly emitted text."""
        if self._calls is None:
            return [{"content": text}] if text else []
        return self._deltas(self._calls.push(text))

    def end(self) -> list[dict[str, Any]]:
        """Deltas for what was held back."""
        return [] if self._calls is None else self._deltas(self._calls.end())

    def _deltas(self, events: list[Event]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for kind, text in events:
            if kind == "content":
                deltas.append({"content": text})
                continue
            call: dict[str, Any] = {"function": {"arguments": text}}
            if kind == "name":
                self._index += 1
                call = {
                    "id": self._form.new_id(),
                    "type": "function",
                    "function": {"name": text, "arguments": ""},
                }
            if self._parallel or self._index == 0:
                deltas.append({"tool_calls": [{"index": self._index, **call}]})
        return deltas


def _calls(form: ToolFormat, schemas: Mapping[str, Mapping[str, Any]]) -> Calls:
    if form.tags is not None:
        return TaggedCalls(form, form.tags, schemas)
    if form.name == "pythonic":
        return PythonicCalls(schemas)
    return MarkedCalls(form) if form.opening else BareCalls(schemas)
