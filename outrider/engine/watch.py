"""A control that remembers what the step was about, for reports; decisions are the inner one's."""

from __future__ import annotations

from typing import Any

from outrider.decode import Control
from outrider.rows import Rows
from outrider.types import Draft, Verdict


class WatchedControl:
    """Per row of the latest step: nodes asked for, drafted, accepted."""

    def __init__(self, inner: Control) -> None:
        self.inner = inner
        self.asked: list[int] = []
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.rejected: list[bool] = []

    def choose(self, rows: Rows) -> list[int]:
        self.asked = self.inner.choose(rows)
        return self.asked

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict, seconds: float) -> None:
        self.drafted, self.accepted = draft.lists[1], verdict.lists.num_accepted
        self.rejected = [not complete for complete in verdict.lists.all_accepted]
        self.inner.observe(rows, draft, verdict, seconds)

    def summary(self) -> dict[str, Any]:
        """The inner control's."""
        return self.inner.summary()
