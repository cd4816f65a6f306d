"""A second process that compiles some of a draft model's programs while this one compiles the others.

Two thirds of a compilation is Python, on one core whatever the machine has. So a helper loads the same model once more and makes
its share of the drafting programs. It may fail for whatever reason: what is missing afterwards is made here, as without it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

# Seconds, as a draft model of two layers takes them on AMD Zen 5: a helper's start, a drafting program, each of its tokens, the
# program of a pass (made here). Only how they compare matters.
START_UP, BASE, TOKEN, PASS = 9, 6, 6.5, 10
MEMORY = 4 << 30  # bytes that must be free for two compilations at once
PATIENCE_S = 900  # a helper that takes longer than this is of no help
GRACE_S = 3  # in which one that is to stop deletes its half-made files


@dataclass(frozen=True)
class Job:
    """What a helper is told. `lengths`: tokens of the drafting programs that it is to make."""

    name: str  # folder or hub id of the model
    dtype: str
    threads: int
    loop_vocab: int
    lengths: tuple[int, ...]


def share(lengths: Sequence[int]) -> tuple[int, ...]:
    """Which of these programs a helper makes, so that both are done at about the same time; none where it would not pay."""
    if len(lengths) < 2 or (os.cpu_count() or 1) < 2 or psutil.virtual_memory().available < MEMORY:
        return ()
    ours, theirs, given = float(PASS), float(START_UP), []
    for length in sorted(lengths, reverse=True):
        seconds = BASE + TOKEN * length
        if theirs < ours:
            theirs += seconds
            given.append(length)
        else:
            ours += seconds
    return tuple(given)


class Helper:
    """A helper at work."""

    def __init__(self, job: Job) -> None:
        command = (sys.executable, "-P", "-m", "outrider.models.compile_loops", json.dumps(asdict(job)))
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        """Until it is done, one way or the other."""
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.stop()

    def stop(self) -> None:
        """It goes, if it is still there: by itself, so that it clears up behind it, else with the compiler it may have called."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
            self._process.kill()
            self._process.wait()
