"""What a chat answer's text means to a client: pieces of a message. Thoughts come first; `tools.py`
finds calls in the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

from outrider.sampling.thinking import ThinkingMarks
from outrider.serve.tools.use import merged_calls
from outrider.thoughts import Part, Thoughts

Delta = dict[str, Any]  # {"reasoning": text}, {"content": text}, {"tool_calls": [...]}


class Reader(Protocol):
    """Reads the content of one answer as it is emitted."""

    @property
    def finish_reason(self) -> str | None:
        """Instead of the engine's, once the answer has ended."""

    def push(self, text: str) -> list[Delta]:
        """Deltas for newly emitted text."""

    def end(self) -> list[Delta]:
        """Deltas for what was held back."""


class PlainReader:
    """Everything is content."""

    finish_reason: str | None = None

    def push(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def end(self) -> list[Delta]:
        return []


class TokenReader(Protocol):
    """Reads one answer by its tokens."""

    @property
    def num_thought(self) -> int:
        """Tokens of thoughts so far."""

    @property
    def finish_reason(self) -> str | None:
        """Instead of the engine's, once the answer has ended."""

    def push(self, tokens: Sequence[int | None], texts: Sequence[str]) -> list[Delta]:
        """Deltas for tokens and the texts that they added."""

    def end(self) -> list[Delta]:
        """Deltas for what was held back."""


class AllContent:
    """Everything is content, which `reader` reads."""

    num_thought = 0

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def finish_reason(self) -> str | None:
        return self._reader.finish_reason

    def push(self, tokens: Sequence[int | None], texts: Sequence[str]) -> list[Delta]:
        return self._reader.push("".join(texts))

    def end(self) -> list[Delta]:
        return self._reader.end()


class ThoughtsFirst:
    """Thoughts, and behind them content, which `reader` reads. White space around the marks belongs
    to them: templates that show earlier thoughts write it."""

    def __init__(self, thinking: ThinkingMarks, reader: Reader, label: str = "") -> None:
        """`label`: a word at the beginning of thoughts that is none of them."""
        self._thoughts = Thoughts(thinking)
        self._reader = reader
        self._label = label
        self._has_begun = False  # a thought was emitted
        self._blank = ""  # white space that is emitted only if more of the same comes
        self._trims = thinking.is_open  # content begins behind a mark

    @property
    def finish_reason(self) -> str | None:
        return self._reader.finish_reason

    @property
    def num_thought(self) -> int:
        return self._thoughts.num_tokens

    def push(self, tokens: Sequence[int | None], texts: Sequence[str]) -> list[Delta]:
        parts = [
            part
            for token, text in zip(tokens, texts, strict=True)
            for part in self._thoughts.push(token, text)
        ]
        return self._deltas(parts)

    def end(self) -> list[Delta]:
        return [*self._deltas(self._thoughts.end()), *self._reader.end()]

    def _deltas(self, parts: Sequence[Part]) -> list[Delta]:
        found: list[Delta] = []
        for kind, group in groupby(parts, itemgetter(0)):
            text = "".join(text for _, text in group)
            if kind == "thought":
                if trimmed := self._trimmed(text):
                    found.append({"reasoning": trimmed})
            elif kind == "answer":
                content = text.lstrip() if self._trims else text
                self._trims = self._trims and not content
                found += self._reader.push(content) if content else []
            else:
                # between two thoughts
                self._trims = True
                self._blank = "\n" if self._has_begun else ""
        return joined(found)

    def _trimmed(self, text: str) -> str:
        text = self._blank + text
        self._blank = ""
        if not self._has_begun:
            text = text.lstrip()
            if len(text) <= len(self._label) and self._label.startswith(text):
                self._blank = text  # the label, or what may become it
                return ""
            text = text.removeprefix(self._label).lstrip()
            self._label = ""
        trimmed = text.rstrip()
        self._has_begun = self._has_begun or bool(trimmed)
        self._blank = text[len(trimmed) :]
        return trimmed


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Deltas with successive texts of one kind as one."""
    found: list[Delta] = []
    for name, group in groupby(deltas, lambda delta: next(iter(delta))):
        if name == "tool_calls":
            found += group
        else:
            found.append({name: "".join(delta[name] for delta in group)})
    return found


def whole_message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """A message from the pieces that a stream would have sent. An answer that is all calls, or all
    thoughts, has no content."""
    calls = merged_calls(deltas)
    content, thought = (
        "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")
    )
    empty = None if calls or thought else ""
    message: dict[str, Any] = {"role": "assistant", "content": content or empty, "refusal": None}
    if thought:
        message["reasoning"] = thought
    return {**message, "tool_calls": calls} if calls else message
