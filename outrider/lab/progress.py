"""How long work tells where it is. The lab only calls this; the command line shows it as a bar with
the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# between two lines of a stage: at its beginning, and at most
FIRST_S = 5.0
LONGEST_S = 60.0


class Progress:
    """One stage at a time. This one tells nobody."""

    def stage(self, name: str, total: int, max_s: float = math.inf) -> None:
        """Begins a stage of `total` units that ends after at most `max_s` seconds.

        What was left of the last stage is not coming.
        """

    def advance(self, units: int = 1) -> None: ...

    def skip(self, units: int) -> None:
        """Units that an earlier run has finished: they are done, and tell nothing about the pace."""

    def say(self, line: str) -> None:
        """One line that stays on the screen."""


QUIET = Progress()


class Lines(Progress):
    """Progress as lines of text, for output that is no terminal: one at once, then after 5, 10, 20,
    40, 60, 60, ... seconds."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._name = ""
        self._total = self._done = self._skipped = 0
        self._max_s = math.inf
        self._began = self._next = 0.0
        self._wait = FIRST_S

    def stage(self, name: str, total: int, max_s: float = math.inf) -> None:
        self._name = name
        self._total = total
        self._done = 0
        self._skipped = 0
        self._max_s = max_s
        self._began = time.perf_counter()
        self._wait = FIRST_S
        self._next = self._began + self._wait
        self._write(
            f"{name}: 0 of {total}" + ("" if math.isinf(max_s) else f", at most {_minutes(max_s)}")
        )

    def advance(self, units: int = 1) -> None:
        self._done += units
        now = time.perf_counter()
        if now < self._next:
            return
        self._wait = min(2 * self._wait, LONGEST_S)
        self._next = now + self._wait
        elapsed = now - self._began
        left = elapsed / max(self._done - self._skipped, 1) * max(self._total - self._done, 0)
        left = min(left, max(self._max_s - elapsed, 0.0))
        self._write(
            f"{self._name}: {self._done} of {self._total}, {_minutes(elapsed)} so far, about "
            f"{_minutes(left)} left"
        )

    def skip(self, units: int) -> None:
        self._done += units
        self._skipped += units

    def say(self, line: str) -> None:
        self._write(line)


def _minutes(seconds: float) -> str:
    """75 -> '1:15'."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
