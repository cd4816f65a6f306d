"""Step times by number of rows and draft length: the sweep that measures them, and the file that
keeps them.

A sweep is a `Control` that asks for another length every step, round and round, so a slow moment of
the machine hits all lengths alike. A server's start times its steps so, and `outrider tune` probes
drafters with the same sweep.

Times are kept in one small JSON file for each combination of machine, model and drafter, in the
cache folder. A file whose facts differ, of another version or with anything strange in it is as
good as none: then steps are timed anew, and the file is replaced. Files are written whole or not at
all, so processes that start together do no harm.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

from outrider.cache import cache_folder, keep_json, keeping, kept_json
from outrider.rows import Rows
from outrider.step import StepFacts

VERSION = 3
MAX_FILES = 200  # the oldest go first
MIN_TIMES = 2  # how often a size is timed, whatever it takes: what was timed once may be anything


class Sweep:
    """A `Control` that goes round draft lengths, a step for each, and times the steps."""

    def __init__(self, lengths: Sequence[int], skip: int = 0) -> None:
        """`skip`: steps at the beginning that are not timed."""
        self.lengths = list(lengths)
        self.asked: list[int] = []  # step by step, before what rows have room for
        self.seconds: dict[int, list[float]] = {}  # by draft nodes of the widest row
        self.experts: dict[int, list[float]] = {}  # the same: of passes that tell
        self._skip = skip

    def known(self) -> dict[int, float]:
        """Median seconds of the sizes that were timed often enough; of two the lower one, for a
        step is only ever disturbed."""
        often = {
            size: seconds
            for size, seconds in sorted(self.seconds.items())
            if len(seconds) >= MIN_TIMES
        }
        return {size: median_low(seconds) for size, seconds in often.items()}

    def known_experts(self) -> dict[int, float]:
        """Mean distinct experts of the sizes whose passes told."""
        return {size: fmean(read) for size, read in sorted(self.experts.items())}

    def choose(self, rows: Rows) -> list[int]:
        length = self.lengths[len(self.asked) % len(self.lengths)]
        self.asked.append(length)
        return [row.clamp_draft(length) for row in rows]

    def observe(self, facts: StepFacts) -> None:
        drafted = max(facts.drafted)
        self._skip -= 1
        # one that asked and got no draft is no plain one
        if self._skip < 0 and bool(drafted) == bool(self.asked[-1]):
            self.seconds.setdefault(drafted, []).append(facts.seconds)
            if facts.experts is not None:
                self.experts.setdefault(drafted, []).append(facts.experts)

    def summary(self) -> dict[str, Any]:
        return {}


@dataclass
class StepTimes:
    """`seconds`, and `experts` where passes told, by number of rows, then by nodes of the widest
    row."""

    facts: dict[str, Any]
    seconds: dict[int, dict[int, float]] = field(default_factory=dict)
    experts: dict[int, dict[int, float]] = field(default_factory=dict)
    is_kept: bool = True  # for the next start

    @classmethod
    def of(cls, facts: dict[str, Any], *, keeps: bool) -> StepTimes:
        """`load`, but where steps take tomorrow something else than today (`Drafter.keeps_costs`),
        as new and never kept."""
        return cls.load(facts) if keeps else cls(facts, is_kept=False)

    @classmethod
    def load(cls, facts: dict[str, Any]) -> StepTimes:
        """The times that an earlier start has kept; empty where nothing was, or nothing that
        fits."""

        def read(content: Any) -> tuple[dict[int, dict[int, float]], ...]:
            if content["version"] != VERSION or content["facts"] != facts:
                raise ValueError("it is of another model or machine")
            return _numbers(content["seconds"]), _numbers(content["experts"])

        return cls(facts, *(kept_json(_path(facts), read) or ()))

    def add(self, rows: int, seconds: dict[int, float], experts: dict[int, float]) -> None:
        """Keep what was just measured for the next start."""
        if seconds:
            self.seconds[rows] = seconds
            self.experts[rows] = experts
            if self.is_kept:
                self.save()

    def save(self) -> None:
        """Keep the costs for the next start. An error costs that start its time, nothing else."""
        content = {
            "version": VERSION,
            "facts": self.facts,
            "seconds": self.seconds,
            "experts": self.experts,
        }
        with keeping("what steps take"):
            keep_json(_path(self.facts), content, max_files=MAX_FILES)


def _numbers(content: Any) -> dict[int, dict[int, float]]:
    """Numbers by rows and nodes as a file has them. Raises ValueError for what is no positive one."""
    found = {
        int(rows): {int(n): float(number) for n, number in sizes.items()}
        for rows, sizes in content.items()
    }
    if not all(
        number > 0 and math.isfinite(number)
        for sizes in found.values()
        for number in sizes.values()
    ):
        raise ValueError("it has a number that is none")
    return found


def _path(facts: dict[str, Any]) -> Path:
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()
    return folder() / f"{digest}.json"


def folder() -> Path:
    """The folder of the files."""
    return cache_folder() / "step-costs"
