"""What a chat answer's text means to a client: pieces of a message. Plain text here; `tools.py` finds calls in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from outrider.serve.tools import merged_calls


class Reader(Protocol):
    """Reads one answer as it is said."""

    @property
    def finish_reason(self) -> str | None:
        """Instead of the engine's, once the answer has ended."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """Deltas for text that was just said."""

    def end(self) -> list[dict[str, Any]]:
        """Deltas for what was held back."""


class PlainText:
    """Everything is content."""

    finish_reason: str | None = None

    def push(self, text: str) -> list[dict[str, Any]]:
        return [{"content": text}] if text else []

    def end(self) -> list[dict[str, Any]]:
        return []


def whole_message(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A message from the pieces that a stream would have sent. An answer that is all calls has no content."""
    calls = merged_calls(deltas)
    content = "".join(delta.get("content") or "" for delta in deltas)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    return {**message, "tool_calls": calls} if calls else message
