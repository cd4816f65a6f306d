"""How long a step waits for a draft, and when none is asked for.

A step waits only while the draft can be expected to arrive before it would come too late.

Too late is after one pass of the target (what a plain step takes, so that a wait can never do more than double a step), or after
the setting `max_wait_ms` where that is less. What passes and replies take is their running median.
"""

from __future__ import annotations

from collections import deque
from statistics import median

LATEST = 16  # times that a median is over
FIRST_S = 0.05  # a pass is taken to last, before one was seen
OVERDUE = 3.0  # times the usual reply, and a pass: then it is no longer expected
MAX_MISSED, ATTEMPT = 24, 3  # steps in a row without a draft before a rest, and between two rests
FIRST_REST, LONGEST_REST = 8, 128  # steps


class RunningMedian:
    """The median of the latest seconds."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LATEST)
        self.value: float | None = None  # None before the first

    def add(self, seconds: float) -> None:
        """Add one time."""
        self._latest.append(seconds)
        self.value = median(self._latest)


class DraftWait:
    """Decides how long a step waits for a draft."""

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
        request was sent to which nothing has come yet: a service that is silent for longer than a pass beyond that is not waited
        for, so one that dies costs a single wait. All on one clock."""
        if now_s >= deadline_s:
            return False
        usual = self.replies.value
        if usual is None:
            return now_s - silent_since_s < self.budget_s
        return asked_s + usual <= deadline_s and now_s - silent_since_s <= OVERDUE * usual + self.budget_s


class Rests:
    """Steps in which a service is not asked, after many in a row for which it had nothing in time.

    Asking would cost its machine and the line, and bring nothing. The next attempt comes after a pause that doubles; one draft in
    time ends it.
    """

    def __init__(self) -> None:
        self._missed = 0  # attempts in a row
        self._pause, self._left = 0, 0  # steps

    @property
    def is_resting(self) -> bool:
        """Whether the present step asks for nothing."""
        return self._left > 0

    def observe(self, *, had_any: bool) -> None:
        """A step wanted drafts, and had one, or none at all."""
        if had_any:
            self._missed = self._pause = self._left = 0
        elif self._left:
            self._left -= 1
        else:
            self._missed += 1
            if self._missed >= MAX_MISSED:
                self._pause = min(2 * self._pause, LONGEST_REST) or FIRST_REST
                self._left, self._missed = self._pause, MAX_MISSED - ATTEMPT
