"""Whether something else ran on the machine while we measured: a speed taken beside a busy neighbour says nothing."""

from __future__ import annotations

import os
import time

import psutil


class Disturbance:
    """Processor time that everyone but this process has used since this was made, the hypervisor's share included."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = time.perf_counter()
        self._before = self._seconds()

    def share(self) -> float:
        """Of all processors' time, 0..1. Fine for half a second and more: systems count in hundredths of a second."""
        available = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (self._seconds() - self._before) / available))

    def _seconds(self) -> float:
        total, own = psutil.cpu_times(), self._process.cpu_times()
        busy = sum(getattr(total, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        return busy - own.user - own.system
