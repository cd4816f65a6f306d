"""What a drafter's reading of texts adds to each token of their answers.

A draft model reads every prompt it is to continue, and without drafts nobody would: on a busy server a few percent of the time.
No step's own price has it (a step that follows a long prompt is no dearer than the next one), so it is measured apart and put
on the tokens: (tokens to read per token said, over the latest texts) x (seconds to read a token). Both factors are the same
whether drafting pays at present or not, so what is known stays right while nothing is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.draft_length.survival import Record
from outrider.rows import Row, Rows

FADE = 0.95  # per text, and per step that reads: a memory of some 20


class ReadingPrice:
    """The price of reading prompts for one drafter."""

    def __init__(self) -> None:
        self._pace, self._texts = Record(), Record()  # seconds per token read; tokens to read per token said

    def read(self, tokens: int, seconds: float) -> None:
        """A step has read so much."""
        self._pace.add(seconds, tokens, FADE)

    def ended(self, tokens: int, said: int) -> None:
        """A text is over that had so many tokens to read when it began."""
        self._texts.add(tokens, said, FADE)

    @property
    def seconds_per_token(self) -> float:
        """Seconds of reading per token of an answer; 0 before a text was read and one ended."""
        known = self._pace.tried and self._texts.tried
        return self.seconds_to_read(1) * (self._texts.kept / self._texts.tried) if known else 0.0

    def seconds_to_read(self, tokens: int) -> float:
        """0 before anything was read."""
        return tokens * self._pace.kept / self._pace.tried if self._pace.tried else 0.0


class ReadingPrices:
    """The price of reading for every drafter of a batch, by what its rows call it (`Row.drafter`)."""

    def __init__(self) -> None:
        self._prices: dict[str | None, ReadingPrice] = {}
        self._begun: dict[int, int] = {}  # row's number -> tokens to read when it joined; rows that may draft
        self._unread: list[int] = []  # per row, before the present step's reading

    def joined(self, rows: Rows, unread: Sequence[int]) -> None:
        """A step begins; per row, tokens that its drafter has not read."""
        self._unread = list(unread)
        known = self._begun
        self._begun = {row.request: known.get(row.request, n) for row, n in zip(rows, unread, strict=True) if may_draft(row)}

    def unread_seconds(self, rows: Rows) -> dict[str | None, float]:
        """What each drafter's rows would take it to read."""
        tokens: dict[str | None, int] = {}
        for row, count in zip(rows, self._unread, strict=True):
            if may_draft(row):
                tokens[row.drafter] = tokens.get(row.drafter, 0) + count
        return {drafter: self._of(drafter).seconds_to_read(count) for drafter, count in tokens.items()}

    def read(self, rows: Rows, unread: Sequence[int], seconds: float) -> None:
        """It has read, and these are left. Seconds are shared out by tokens."""
        done: dict[str | None, int] = {}
        for row, before, after in zip(rows, self._unread, unread, strict=True):
            done[row.drafter] = done.get(row.drafter, 0) + max(0, before - after)
        total = sum(done.values())
        for drafter, tokens in done.items():
            if tokens:
                self._of(drafter).read(tokens, seconds * tokens / total)

    def ended(self, rows: Rows) -> dict[str | None, float]:
        """A step is over. The prices that the texts it brought to their end have changed."""
        over = [row for row in rows if row.finish_reason is not None and row.request in self._begun]
        for row in over:
            self._of(row.drafter).ended(self._begun.pop(row.request), max(1, len(row.output)))
        return {row.drafter: self._of(row.drafter).seconds_per_token for row in over}

    def _of(self, drafter: str | None) -> ReadingPrice:
        return self._prices.setdefault(drafter, ReadingPrice())


def may_draft(row: Row) -> bool:
    """Whether anything is ever drafted for it."""
    return row.draft_bound is None or row.draft_bound > 0
