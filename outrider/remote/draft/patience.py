"""How long a step waits for a draft: only while it can be expected to arrive before it would come too late.

Too late is after one pass of the target (what a plain step takes, so that a wait can never do more than double a step), or after
the setting `max_wait_ms` where that is less. What passes and replies take is their running median.
"""

from __future__ import annotations

from collections import deque
from statistics import median

LATEST = 16  # times that a median is over
FIRST_S = 0.05  # a pass is taken to last, before one was seen
OVERDUE = 3.0  # times the usual reply: then it is no longer expected
SLACK_S = 0.002  # that a reply may be later than so, for threads take turns


class RunningMedian:
    """Of the latest seconds."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LATEST)
        self.value: float | None = None  # None before the first

    def add(self, seconds: float) -> None:
        """One more."""
        self._latest.append(seconds)
        self.value = median(self._latest)


class Patience:
    """See the module docstring."""

    def __init__(self, max_wait_s: float | None) -> None:
        """`max_wait_s`: the most a step waits; None: one pass."""
        self._max_wait_s = max_wait_s
        self.passes, self.replies = RunningMedian(), RunningMedian()

    @property
    def budget_s(self) -> float:
        """Seconds that the present step may wait."""
        predicted = FIRST_S if self.passes.value is None else self.passes.value
        return predicted if self._max_wait_s is None else min(predicted, self._max_wait_s)

    def expects(self, asked_s: float, silent_since_s: float, now_s: float, deadline_s: float) -> bool:
        """Whether a reply to what was asked at `asked_s` can be expected until the deadline. `silent_since_s`: when the first
        request was sent to which nothing has come yet: whoever is silent for long is not waited for. All on one clock."""
        if now_s >= deadline_s:
            return False
        usual = self.replies.value
        if usual is None:
            return now_s - silent_since_s < self.budget_s
        return asked_s + usual <= deadline_s and now_s - silent_since_s <= OVERDUE * usual + SLACK_S
