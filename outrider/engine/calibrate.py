"""What a step costs by number of rows and draft length, measured before the first request: so that a load-aware control knows
from its first step what a crowd costs, and need not find out at its expense.

Between the numbers of rows measured here the control interpolates (`Goodput`), and real steps correct it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from outrider.admission import new_row
from outrider.control import Goodput
from outrider.engine.batch import Batch
from outrider.models.probe import probe_tokens
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft, Verdict

BUDGET_S = 8.0  # after that, what is known must do
WARM_UP, REPEATS = 2, 3  # steps per number of rows, and per size
PATTERN, TIMES = 24, 4  # a prompt that repeats itself: look-up drafters offer something, too


def calibrate(batch: Batch, most_rows: int, status: Callable[[str], None] = lambda line: None) -> None:
    """Tell the batch's control what steps cost, where it wants to know. Leaves the batch as new."""
    control = batch.control.inner
    if not isinstance(control, Goodput):
        return
    status("timing steps: draft lengths by rows")
    began = time.perf_counter()
    for count in _counts(most_rows):
        for size, seconds in _times(batch, count, _sizes(control.most)).items():
            control.learn_cost(count, size, seconds)
        if time.perf_counter() - began > BUDGET_S:
            break
    batch.reset()  # what drafters learned from these texts is no user's


def _counts(most: int) -> list[int]:
    """The ends first: what lies between can be guessed."""
    middle = [count for count in (8, 2, 16, 4, 32, 64, 128) if 1 < count < most]
    return [1, most, *middle] if most > 1 else [1]


def _sizes(most: int) -> list[int]:
    return sorted({0, (most + 1) // 2, most})


def _times(batch: Batch, count: int, sizes: list[int]) -> dict[int, float]:
    """Nodes in the widest row -> median seconds of a step of `count` rows."""
    decoder, control = batch.decoder, batch.decoder.control
    built = batch.built
    pattern = probe_tokens(built.target.lm.shape.vocab_size, PATTERN, "cpu")[0].tolist()
    prompt = (pattern * TIMES)[: max(1, built.context // 2)]
    timer = decoder.control = _Timer(sizes)
    params = SamplingParams(max_tokens=built.context, ignore_eos=True)
    try:
        for number in range(count):
            decoder.add(new_row(built, number, prompt, params, with_text=False))
        for _ in range(WARM_UP + REPEATS * len(sizes)):
            if any(row.finish_reason for row in decoder.rows):  # a very short context
                break
            decoder.step()
    finally:
        decoder.control = control
        for index in reversed(range(len(decoder.rows))):
            decoder.remove(index)
    return {size: median(seconds) for size, seconds in timer.seconds.items()}


class _Timer:
    """A `Control` that goes round the sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self._turns = self._round(sizes)
        self._skip = WARM_UP
        self.seconds: dict[int, list[float]] = {}

    def choose(self, rows: Rows) -> list[int]:
        size = next(self._turns)
        return [row.wish(size) for row in rows]

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict, seconds: float) -> None:
        self._skip -= 1
        if self._skip < 0:
            self.seconds.setdefault(max(draft.lists[1]), []).append(seconds)

    def summary(self) -> dict[str, Any]:
        return {}

    def _round(self, sizes: list[int]) -> Iterator[int]:
        while True:
            yield from sizes
