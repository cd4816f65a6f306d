"""A control that remembers what the step was about, for reports, lets drafters read new texts at a measured pace, and notices
what passes between two steps: handing out tokens, and the threads that send them, cost as much for a step of one token as of
five.

How much is drafted is the inner control's decision. A row whose text the drafter has not read yet is asked for nothing.
"""

from __future__ import annotations

import time
from typing import Any

from outrider.decode import Control
from outrider.draft_length.each_drafter import EachDrafter
from outrider.drafters.base import Drafter
from outrider.engine.reading_price import ReadingPrices
from outrider.models.lm import PREFILL_CHUNK
from outrider.rows import Rows
from outrider.types import Draft, Verdict


class WatchedControl:
    """Per row of the latest step: nodes asked for, drafted, accepted."""

    def __init__(self, inner: Control, drafter: Drafter) -> None:
        self.inner = inner
        self.asked: list[int] = []
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.rejected: list[bool] = []
        self._drafter = drafter
        self._prices = ReadingPrices()
        self._reading_s = 0.0  # of the present step, for texts that are new to the drafter
        self._ended_s: float | None = None  # when the latest step was over; None: something else was done since

    def rest(self) -> None:
        """What passes until the next step is no part of a step's price."""
        self._ended_s = None

    def choose(self, rows: Rows) -> list[int]:
        if isinstance(self.inner, EachDrafter):
            self._tell(self.inner, rows)
        wanted = self.inner.choose(rows)
        began = time.perf_counter()
        self.asked = self._drafter.prepare(rows, wanted, PREFILL_CHUNK)
        self._reading_s = time.perf_counter() - began
        if isinstance(self.inner, EachDrafter):
            if any(wanted):
                self._prices.read(rows, self._drafter.unread(rows), self._reading_s)
            self.asked = self.inner.waive(self.asked)
        return self.asked

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict, seconds: float) -> None:
        self.drafted, self.accepted = draft.lists[1], verdict.lists.num_accepted
        self.rejected = [not complete for complete in verdict.lists.all_accepted]
        self.inner.observe(rows, draft, verdict, seconds - self._reading_s)  # like a prompt's, no part of a step's price
        if isinstance(self.inner, EachDrafter):
            for drafter, price in self._prices.ended(rows).items():
                self.inner.learn_reading(drafter, price)
        self._ended_s = time.perf_counter()

    def summary(self) -> dict[str, Any]:
        """The inner control's."""
        return self.inner.summary()

    def _tell(self, control: EachDrafter, rows: Rows) -> None:
        """What a step costs that is no step's own: the pause before it, and what its drafters have to read."""
        if self._ended_s is not None:
            control.learn_pause(len(rows), time.perf_counter() - self._ended_s)
        self._prices.joined(rows, self._drafter.unread(rows))
        control.learn_unread(self._prices.unread_seconds(rows))
