"""Totals of one engine since it started, as plain numbers: `ModelTotals` is the `Observer` after
/metrics.

It runs in the engine's thread between two steps, so it only adds integers: a step costs one lock
and a few additions per row, whatever the number of series. A scrape takes the same lock, so it sees
whole steps: never a draft without its verdict.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from outrider.engine.observer import Observer, StepReport
from outrider.engine.request import Finish, Request
from outrider.stats import PHASES, DecodeStats, PartStats, sum_parts

FINISHES = ("stop", "length", "abort", "timeout", "error")
SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_SECONDS = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKENS = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
SHARES = tuple(share / 10 for share in range(11))


class Histogram:
    """Observations by bucket. `bounds`: upper ends, included."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last is everything above
        self.total = 0.0  # sum of the values

    def add(self, value: float, times: int = 1) -> None:
        """Adds a value `times` over: rows of a step share their length and their gap."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class DrafterTotals:
    """One drafter's drafts. Position 0 is the first draft token; in a tree, the first on the kept
    path."""

    def __init__(self) -> None:
        self.drafts = 0  # a row's steps with at least one draft token
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.parts: dict[str, PartStats] = {}  # of drafts that have several
        self.accepted_at: list[int] = []
        self.rejected_at: list[int] = []
        # draft tokens that the control wanted, plain steps included
        self.asked = Histogram(LENGTHS)
        self.request_acceptance = Histogram(SHARES)

    def count(self, asked: int, drafted: int, accepted: int, rejected: bool, emitted: int) -> None:
        """One row's step. `accepted` may be more than went into the text, where the text ended."""
        self.asked.add(asked)
        if not drafted:
            return
        accepted = min(accepted, emitted)
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        while len(self.accepted_at) < accepted:
            self.accepted_at.append(0)
        for position in range(accepted):
            self.accepted_at[position] += 1
        if emitted > accepted and rejected:
            while len(self.rejected_at) <= accepted:
                self.rejected_at.append(0)
            self.rejected_at[accepted] += 1


class ModelTotals(Observer):
    """Sums over requests and steps. Read it under `lock`. The engine itself knows how many wait and
    were preempted."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.lock = threading.Lock()
        self._clock = clock
        self.steps = 0
        self.row_steps = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.experts = 0.0
        self.phase_s = dict.fromkeys(PHASES, 0.0)
        self.finished_by = dict.fromkeys(FINISHES, 0)
        self.by_drafter: dict[str, DrafterTotals] = {}
        self.step_s = Histogram(TOKEN_SECONDS)
        self.token_gap_s = Histogram(TOKEN_SECONDS)
        self.ttft_s = Histogram(SECONDS)
        self.tpot_s = Histogram(TOKEN_SECONDS)
        self.e2e_s = Histogram(REQUEST_SECONDS)
        self.queue_s = Histogram(REQUEST_SECONDS)
        self.prefill_s = Histogram(REQUEST_SECONDS)
        self.decode_s = Histogram(REQUEST_SECONDS)
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)
        # rows that take part for the first time in the next step: it gives them a first token, not
        # a next one
        self._joined = 0
        self._stepped_at: float | None = None

    def admitted(self, request: Request, queued_s: float, cached_tokens: int) -> None:
        """A prompt begins to be read."""
        with self.lock:
            self.queue_s.add(queued_s)
            self.cached_prompt_tokens += cached_tokens

    def prefilled(self, request: Request, seconds: float, tokens: int) -> None:
        """A prompt is read."""
        with self.lock:
            self._joined += 1
            self.prompt_tokens += len(request.prompt)

    def stepped(self, report: StepReport) -> None:
        """A step of the batch."""
        now = self._clock()
        parts = (
            report.drafters,
            report.asked,
            report.drafted,
            report.accepted,
            report.rejected,
            report.emitted,
        )
        rows = zip(*parts, strict=True)
        with self.lock:
            self.steps += 1
            self.experts += report.experts or 0.0
            self.row_steps += report.rows
            self.generation_tokens += sum(report.emitted)
            for phase, seconds in report.seconds.items():
                self.phase_s[phase] += seconds
            self.step_s.add(sum(report.seconds.values()))
            goes_on = report.rows - self._joined
            if self._stepped_at is not None and goes_on > 0:
                self.token_gap_s.add(now - self._stepped_at, goes_on)
            self._joined = 0
            self._stepped_at = now
            for name, *numbers in rows:
                self._drafter(name).count(*numbers)
            for name, counts in zip(report.drafters, report.parts, strict=True):
                if counts:
                    totals = self._drafter(name)
                    totals.parts = sum_parts(totals.parts, counts)

    def emitted(self, tokens: int) -> None:
        """Tokens of an engine whose steps are made elsewhere, and counted there."""
        with self.lock:
            self.generation_tokens += tokens

    def finished(self, request: Request, finish: Finish) -> None:
        """A request ended, well or not."""
        stats = finish.stats
        with self.lock:
            self.finished_by[finish.reason] += 1
            if not stats.emitted:
                return  # it has no latencies
            self.request_prompt_tokens.add(finish.prompt_tokens)
            self.request_generation_tokens.add(stats.emitted)
            self._count_times(finish, stats)
            if stats.drafted:
                self._drafter(finish.drafter).request_acceptance.add(stats.accepted / stats.drafted)

    def _count_times(self, finish: Finish, stats: DecodeStats) -> None:
        self.ttft_s.add(stats.ttft_s)
        self.e2e_s.add(stats.ttft_s + stats.decode_s)
        self.prefill_s.add(finish.prefill_s)
        self.decode_s.add(stats.decode_s)
        if stats.tpot_s is not None:
            self.tpot_s.add(stats.tpot_s)

    def _drafter(self, name: str) -> DrafterTotals:
        totals = self.by_drafter.get(name)
        if totals is None:
            totals = self.by_drafter[name] = DrafterTotals()
        return totals
