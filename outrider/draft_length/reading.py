"""The cost of a draft model's reading of each prompt that it continues; without drafts nobody would
read it twice.

No step's own price has that, so it is put on the emitted tokens: (tokens to read per token emitted,
over the latest texts) x (seconds to read a token). Both factors are the same whether drafting pays
at present or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outrider.draft_length.survival import FadingMean
from outrider.rows import Row, Rows


class ReadingPrice:
    """`unread`: a drafter's count of tokens that it has to read before it can draft for each row."""

    def __init__(self, unread: Callable[[Rows], list[int]]) -> None:
        self._count = unread
        # by request: tokens its drafter had to read when it joined
        self._joined: dict[int, int] = {}
        self._unread: dict[str, int] = {}  # at present, by drafter
        # seconds per token read; one drafter of a server reads texts at most
        self._pace = FadingMean()
        self._texts: dict[str, FadingMean] = {}  # tokens to read per token emitted, by drafter

    def look(self, rows: Rows, name_of: Callable[[Row], str]) -> None:
        """Count what is unread before a step. Rows that nothing is ever drafted for do not count."""
        drafting = [
            pair for pair in zip(rows, self._count(rows), strict=True) if pair[0].draft_bound != 0
        ]
        self._joined = {
            row.request: self._joined.get(row.request, count) for row, count in drafting
        }
        self._unread = {}
        for row, count in drafting:
            self._unread[name_of(row)] = self._unread.get(name_of(row), 0) + count

    def timed(self, tokens: int, seconds: float) -> None:
        """This many tokens were read in this many seconds."""
        if tokens:
            self._pace.add(seconds, tokens)

    def ended(self, rows: Iterable[Row], name_of: Callable[[Row], str]) -> None:
        """A step is over: texts that ended say how much is read for each emitted token."""
        for row in rows:
            if row.finish_reason is not None and row.request in self._joined:
                text = self._texts.setdefault(name_of(row), FadingMean())
                text.add(self._joined.pop(row.request), max(1, len(row.output)))

    def per_token_s(self, name: str) -> float:
        """Seconds of reading for each emitted token of a drafter's rows."""
        text = self._texts.get(name)
        return 0.0 if text is None else self._token_s * text.mean(0.0, 0.0)

    def unread_s(self, name: str) -> float:
        """Seconds to read all that a drafter must read before it can draft for every one of its
        rows."""
        return self._token_s * self._unread.get(name, 0)

    @property
    def _token_s(self) -> float:
        return self._pace.mean(0.0, 0.0) if self._pace.tried else 0.0
