"""What every stage is given: the device, the time left, a folder for results. CUDA-only calls are
here, so that the small form on a CPU runs the same stages."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

WARM_UPS = 3  # calls: a CUDA graph is recorded at a shape's second one


class OutOfTimeError(Exception):
    """A stage's time has run out before it was done. What it kept stays."""


@dataclass
class Context:
    """What a stage may use, and how long."""

    device: torch.device
    tiny: bool  # small shapes, few repeats
    deadline_s: float  # on time.monotonic(): a stage looks at left_s() and stops by itself
    say: Callable[[str], None]  # a line for the person who watches
    # merge these keys into the stage's result and write the JSON file now
    keep: Callable[[dict[str, Any]], None]

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a real one: floors are judged only there."""
        return self.device.type == "cuda"

    def left_s(self) -> float:
        """Seconds until the deadline, negative behind it."""
        return self.deadline_s - time.monotonic()

    def check_time(self, needed_s: float = 0.0) -> None:
        """Raise OutOfTimeError where fewer seconds are left than `needed_s`."""
        if (left := self.left_s()) < needed_s:
            raise OutOfTimeError(
                f"{max(left, 0):.0f} s were left, {needed_s:.0f} s are needed for the next part"
            )

    def synchronize(self) -> None:
        """Wait for the device; on a CPU there is nothing to wait for."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """Seconds of each of `repeats` calls after warm-up calls: device time between events, wall
        time on a CPU.

        Calls are queued one behind the other, so a host that is slower than the device shows in the
        numbers.
        """
        for _ in range(WARM_UPS if self.on_cuda else 1):
            call()
        self.synchronize()
        if not self.on_cuda:
            return [_wall_seconds(call) for _ in range(repeats)]
        with torch.cuda.device(self.device):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
            marks[0].record()
            for mark in marks[1:]:
                call()
                mark.record()
            self.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def host_seconds(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """Seconds of the host's clock for each of `repeats` calls, each waited for, after warm-up
        calls."""

        def waited() -> None:
            call()
            self.synchronize()

        for _ in range(WARM_UPS if self.on_cuda else 1):
            waited()
        return [_wall_seconds(waited) for _ in range(repeats)]

    def free_bytes(self) -> int | None:
        """Device memory that is free; None on a CPU."""
        return torch.cuda.mem_get_info(self.device)[0] if self.on_cuda else None

    def release(self) -> None:
        """Give back what nobody holds any more, so that the next model finds the memory free."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()


def short_traceback(error: BaseException) -> list[str]:
    """The last lines of a traceback, without the folders of this machine."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    return [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]


def _wall_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
