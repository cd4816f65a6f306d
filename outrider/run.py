"""Rows run to their end, some at a time: the one loop around `Decoder.step` of everything that is
no server."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import Protocol, TypeVar

from outrider.rows import Row, Rows

AnyRow = TypeVar("AnyRow", bound=Row, contravariant=True)


class Stepper(Protocol[AnyRow]):
    """The loop that rows join, step in and leave: `Decoder`, or the replay of a log."""

    rows: Rows

    def add(self, row: AnyRow) -> None: ...

    def remove(self, index: int) -> Row: ...

    def step(self) -> object: ...


def has_ended(row: Row) -> bool:
    """Whether a row's text is complete."""
    return row.finish_reason is not None


def run_rows(
    decoder: Stepper[AnyRow],
    rows: Iterable[AnyRow],
    max_rows: int | None = None,
    is_over: Callable[[Row], bool] = has_ended,
) -> Generator[list[Row], None, None]:
    """Decode rows, at most `max_rows` at a time; yields the rows of each step, when those that are
    over have left.

    Rows that are in the decoder already take part. None is left in it when the generator ends, by
    itself, closed or by an error. Their times (`DecodeStats`) are counted from the start of the
    run.
    """
    waiting = iter(rows)
    started = time.perf_counter()
    try:
        while True:
            for row in islice(waiting, None if max_rows is None else max_rows - len(decoder.rows)):
                decoder.add(row)
            if not len(decoder.rows):
                return
            decoder.step()
            seconds = time.perf_counter() - started
            stepped = list(decoder.rows)
            for index in reversed(range(len(stepped))):
                _time(stepped[index], seconds)
                if is_over(stepped[index]):
                    decoder.remove(index)
            yield stepped
    finally:
        while len(decoder.rows):
            decoder.remove(0)


def _time(row: Row, now_s: float) -> None:
    """Split the time since the run began at the row's first token."""
    stats = row.stats
    if stats.steps == 1:
        stats.ttft_s = now_s
    stats.decode_s = now_s - stats.ttft_s
