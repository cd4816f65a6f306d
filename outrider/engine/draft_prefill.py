"""The control of a server's batch: drafters read new texts at a measured pace, and reports learn what a step was about.

How much is drafted is the inner control's decision. A row whose text the drafter has not read yet is asked for nothing.

A draft model reads every prompt it is to continue; without drafts nobody would. No step's own price has that, so it is put on the
emitted tokens: (tokens to read per token emitted, over the latest texts) x (seconds to read a token). Both factors are the same
whether drafting pays at present or not.
"""

from __future__ import annotations

import time
from typing import Any

from outrider.decode import Control
from outrider.draft_length import AutoLength
from outrider.draft_length.survival import Record
from outrider.drafters.base import Drafter
from outrider.models.lm import PREFILL_CHUNK
from outrider.rows import Row, Rows
from outrider.types import Draft, Verdict

FADE = 0.95  # per text, and per step that reads: a memory of some 20


class PrefillingControl:
    """Per row of the latest step: nodes asked for, drafted, accepted."""

    def __init__(self, inner: Control, drafter: Drafter) -> None:
        self.inner = inner
        self.asked: list[int] = []
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.rejected: list[bool] = []
        self._drafter = drafter
        self._unread: dict[int, int] = {}  # by request: tokens its drafter had to read when it joined
        self._pace = Record()  # seconds per token read; one drafter of a server reads texts at most
        self._texts: dict[str, Record] = {}  # tokens to read per token emitted, by drafter
        self._reading_s = 0.0  # of the present step

    def choose(self, rows: Rows) -> list[int]:
        auto = self.inner if isinstance(self.inner, AutoLength) else None
        unread = self._drafter.unread(rows)
        if auto is not None:
            self._tell(auto, rows, unread)
        wanted = self.inner.choose(rows)
        began = time.perf_counter()
        self.asked = self._drafter.prepare(rows, wanted, PREFILL_CHUNK)
        self._reading_s = time.perf_counter() - began
        if auto is not None:
            if done := sum(unread) - sum(self._drafter.unread(rows)):
                self._pace.add(self._reading_s, done, FADE)
            self.asked = auto.drop_unready(rows, self.asked)
        return self.asked

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict, seconds: float) -> None:
        self.drafted, self.accepted = draft.lists[1], verdict.lists.num_accepted
        self.rejected = [not complete for complete in verdict.lists.all_accepted]
        self.inner.observe(rows, draft, verdict, seconds - self._reading_s)  # like a prompt's, no part of a step's price
        if isinstance(self.inner, AutoLength):
            for row in rows:
                if row.finish_reason is not None and row.request in self._unread:
                    text = self._texts.setdefault(self.inner.name_of(row.drafter), Record())
                    text.add(self._unread.pop(row.request), max(1, len(row.output)), FADE)

    def summary(self) -> dict[str, Any]:
        """The inner control's."""
        return self.inner.summary()

    def _tell(self, auto: AutoLength, rows: Rows, unread: list[int]) -> None:
        """What reading costs each drafter per emitted token, and what it would take to read all that is not read yet."""
        pace = self._pace.mean(0.0, 0.0) if self._pace.tried else 0.0
        drafting = [(row, count) for row, count in zip(rows, unread, strict=True) if may_draft(row)]
        self._unread = {row.request: self._unread.get(row.request, count) for row, count in drafting}
        for name, goodput in auto.drafters.items():
            text = self._texts.get(name)
            goodput.reading_s = pace * text.mean(0.0, 0.0) if text is not None else 0.0
            goodput.unread_s = pace * sum(count for row, count in drafting if auto.name_of(row.drafter) == name)


def may_draft(row: Row) -> bool:
    """Whether anything is ever drafted for it."""
    return row.draft_bound is None or row.draft_bound > 0
