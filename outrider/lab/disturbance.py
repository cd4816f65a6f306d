"""Whether something else ran on the machine while we measured, and when a disturbed run is worth
repeating.

A speed taken alongside a busy neighbour says little, so such a run is repeated and the calmest attempt
counts. Repeating is bounded: a few attempts for each run, none after a deadline, and none where it
has not helped several times in a row, because the neighbour stays. What remains disturbed is kept
and called so.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

# runs in a row that stayed disturbed in all their attempts: from then on nothing is repeated
GIVE_UP = 3
SILENCE_S = 30.0  # at least, between two lines about repeating

T = TypeVar("T")


class Disturbance:
    """Processor time that everyone but this process has used since this was made, the hypervisor's
    share included."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = time.perf_counter()
        self._before = self._seconds()

    def share(self) -> float:
        """The share of all processors' time that other processes used, 0..1. Fine for half a second
        and more: systems count in hundredths of a second."""
        available = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (self._seconds() - self._before) / available))

    def _seconds(self) -> float:
        total = psutil.cpu_times()
        times = self._process.cpu_times()
        busy = sum(
            getattr(total, name, 0.0)
            for name in ("user", "nice", "system", "irq", "softirq", "steal")
        )
        return busy - times.user - times.system


@dataclass
class Repeats:
    """Repeats disturbed runs within bounds, and tells `say` about it, seldom."""

    max_other_cpu: float  # share of the processors that others may use during a run
    say: Callable[[str], None] = lambda line: None
    # on the clock of `time.perf_counter`; nothing is repeated after it
    deadline_s: float = math.inf
    # runs in a row that no attempt found undisturbed
    _num_disturbed: int = field(default=0, init=False)
    _reported_s: float = field(default=-math.inf, init=False)

    def calmest(
        self, run: Callable[[], T], share_of: Callable[[T], float], limit: int
    ) -> tuple[T, int]:
        """The attempt during which others used least, and how many attempts there were: one, and at
        most `limit` further ones."""
        attempts = [run()]
        while (
            share_of(attempts[-1]) > self.max_other_cpu
            and len(attempts) <= limit
            and self._may_repeat(share_of(attempts[-1]))
        ):
            attempts.append(run())
        best = min(attempts, key=share_of)
        if share_of(best) <= self.max_other_cpu:
            self._num_disturbed = 0
        elif len(attempts) > limit > 0:
            self._num_disturbed += 1
        return best, len(attempts)

    def _may_repeat(self, share: float) -> bool:
        counted = "so they count as they are and are called disturbed"
        refusal = ""
        if time.perf_counter() >= self.deadline_s:
            refusal = f"there is no time left to repeat runs, {counted}"
        elif self._num_disturbed >= GIVE_UP:
            refusal = f"repeating runs has not helped, {counted}"
        if time.perf_counter() - self._reported_s >= SILENCE_S:
            self._reported_s = time.perf_counter()
            self.say(
                f"other processes use {share:.0%} of the processors: "
                f"{refusal or 'disturbed runs are repeated'}"
            )
        return not refusal
