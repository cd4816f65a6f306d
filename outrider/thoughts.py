"""Thoughts and answer separated in a text as it grows, and stop strings that count in the answer
only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from outrider.sampling.thinking import Phase, ThinkingMarks, ThinkingState
from outrider.stops import StopStrings, overlap

Kind = Literal["thought", "answer", "mark"]
Part = tuple[Kind, str]


class Thoughts:
    """Follows one answer. The parts it gives, joined, are the text; what may still become a mark is
    held back."""

    def __init__(self, thinking: ThinkingMarks) -> None:
        self._thinking = thinking
        self._state = ThinkingState.beginning(thinking)
        self._held = ""  # white space before an opening mark, or what may become a mark
        self.num_tokens = 0  # of thoughts, marks not counted where they are tokens

    @property
    def phase(self) -> Phase:
        return self._state.phase

    def push(self, token: int | None, text: str) -> list[Part]:
        """The text that one token added; None: text without a token, at the end."""
        if not text and token is None:
            return []
        if self.phase == "answer" and not (
            self._thinking.repeats and token == self._thinking.opening_id
        ):
            return [("answer", text)] if text else []
        return (
            self._by_token(token, text)
            if self._thinking.closing_ids
            else self._by_text(token, text)
        )

    def end(self) -> list[Part]:
        """The text that was held back, once no more will come."""
        held = self._held
        self._held = ""
        return [("thought" if self.phase == "thinking" else "answer", held)] if held else []

    def _by_token(self, token: int | None, text: str) -> list[Part]:
        before = self._state
        if token is not None:
            self._state = before.after(token, self._thinking, blank=not (self._held + text).strip())
            self.num_tokens = self._state.thought
        held = self._held + text
        now = self.phase
        self._held = ""
        if before.phase != "thinking":
            if now == "before":
                self._held = held
                return []
            return [("mark" if now == "thinking" else "answer", held)]
        if now == "answer":
            return _up_to_mark(held, self._thinking.closing)
        if self._state.closing:
            self._held = held
            return []
        return [("thought", held)] if held else []

    def _by_text(self, token: int | None, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        if self.phase == "before":
            parts += self._before()
        elif token is not None:
            self.num_tokens += 1
        if self.phase == "thinking":
            parts += self._inside()
        return parts

    def _before(self) -> list[Part]:
        begun = self._held.lstrip()
        blank = self._held[: len(self._held) - len(begun)]
        for mark in self._thinking.opening:
            if begun.startswith(mark):
                self._state = ThinkingState("thinking")
                self._held = begun[len(mark) :]
                return [("mark", blank + mark)]
        if any(mark.startswith(begun) for mark in self._thinking.opening):
            return []
        self._state = ThinkingState("answer")
        held = self._held
        self._held = ""
        return [("answer", held)]

    def _inside(self) -> list[Part]:
        starts = [
            (start, mark)
            for mark in self._thinking.closing
            if (start := self._held.find(mark)) >= 0
        ]
        if starts:
            start, mark = min(starts)
            thought = self._held[:start]
            answer = self._held[start + len(mark) :]
            self._held = ""
            self._state = ThinkingState("answer")
            parts: list[Part] = [("thought", thought), ("mark", mark), ("answer", answer)]
            return [part for part in parts if part[1]]
        keep = max(overlap(self._held, mark) for mark in self._thinking.closing)
        safe = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return [("thought", safe)] if safe else []


def _up_to_mark(text: str, marks: Sequence[str]) -> list[Part]:
    """Parts of the text that came with the tokens of a closing mark: the token before may have left
    some for them to release."""
    start = max((text.rfind(mark) for mark in marks if text.endswith(mark)), default=0)
    return [("thought", text[:start]), ("mark", text[start:])] if start else [("mark", text)]


class StopsBehindThoughts(StopStrings):
    """Stop strings that do not count in thoughts: models repeat there the string that should end
    the answer."""

    def __init__(
        self,
        stops: Sequence[str],
        thinking: ThinkingMarks,
        *,
        after: int = 0,
        include: bool = False,
    ) -> None:
        super().__init__(stops, after=after, include=include)
        self._thoughts = Thoughts(thinking)

    def push(self, text: str, token: int | None = None) -> str:
        """See `StopStrings`. `token`: what added the text."""
        if self.found:
            return ""
        parts = self._thoughts.push(token, text)
        if all(kind != "answer" for kind, _ in parts):
            self.skip()
        return self._shown(parts)

    def flush(self) -> str:
        """See `StopStrings`."""
        shown = self._shown(self._thoughts.end())
        return shown + super().flush()

    def _shown(self, parts: Sequence[Part]) -> str:
        """The text that may be shown. Thoughts end what could have become a stop string."""
        return "".join(
            StopStrings.push(self, text) if kind == "answer" else StopStrings.flush(self) + text
            for kind, text in parts
        )
