"""Drafters of a server read new texts at a measured pace: before every step's draft, one piece of
them."""

from __future__ import annotations

import time
from typing import Any

from outrider.draft_length import AutoLength
from outrider.drafters.base import Drafter
from outrider.models.lm import PREFILL_CHUNK
from outrider.rows import Rows
from outrider.step import Control, StepFacts


class DraftPrefill:
    """A `Control` around the one that chooses lengths: a row whose text the drafter has not read to
    its end gets no draft.

    An `AutoLength` learns what reading costs.
    """

    def __init__(self, drafter: Drafter, control: Control) -> None:
        self.control = control
        self._drafter = drafter
        self._auto = control if isinstance(control, AutoLength) else None
        self.fed: list[int] = []  # rows that the latest step read some of

    def choose(self, rows: Rows) -> list[int]:
        """The lengths that the control asks for, after one more piece of the missing text has been
        read; 0 where more of it is missing."""
        asked = self.control.choose(rows)
        unread = self._drafter.unread(rows)
        began = time.perf_counter()
        ready = self._drafter.prepare(rows, asked, PREFILL_CHUNK)
        seconds = time.perf_counter() - began
        left = self._drafter.unread(rows)
        self.fed = [
            index
            for index, (before, now) in enumerate(zip(unread, left, strict=True))
            if now < before
        ]
        if self._auto is None or self._auto.reading is None:
            return ready
        self._auto.reading.timed(sum(unread) - sum(left), seconds)
        return self._auto.drop_unready(rows, ready)

    def observe(self, facts: StepFacts) -> None:
        """The control learns from the step."""
        self.control.observe(facts)

    def summary(self) -> dict[str, Any]:
        """The control's."""
        return self.control.summary()
