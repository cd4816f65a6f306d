"""Drafters of a server read new texts at a measured pace: a phase of its own in every step, between choosing and drafting.

How much is drafted is the control's decision. A row whose text the drafter has not read yet is asked for nothing.
"""

from __future__ import annotations

import time

from outrider.draft_length import AutoLength
from outrider.drafters.base import Drafter
from outrider.models.lm import PREFILL_CHUNK
from outrider.rows import Rows


class DraftPrefill:
    """`auto`: the control of the same rows, which learns what reading costs; None: lengths do not follow the clock."""

    def __init__(self, drafter: Drafter, auto: AutoLength | None = None) -> None:
        self._drafter, self._auto = drafter, auto
        self.fed: list[int] = []

    def read(self, rows: Rows, asked: list[int]) -> list[int]:
        """One piece of what is missing; returns `asked`, 0 where a text is not read to its end."""
        unread, began = self._drafter.unread(rows), time.perf_counter()
        ready = self._drafter.prepare(rows, asked, PREFILL_CHUNK)
        seconds, left = time.perf_counter() - began, self._drafter.unread(rows)
        self.fed = [index for index, (before, now) in enumerate(zip(unread, left, strict=True)) if now < before]
        if self._auto is None or self._auto.reading is None:
            return ready
        self._auto.reading.timed(sum(unread) - sum(left), seconds)
        return self._auto.drop_unready(rows, ready)
