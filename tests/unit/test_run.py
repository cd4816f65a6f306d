"""Rows run to their end."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.rows import Row
from outrider.run import run_rows
from outrider.sampling.params import SamplingParams
from tests.helpers import make_row


class Counting:
    """Steps that add one token to every row, without a model."""

    def __init__(self) -> None:
        self.rows: Any = []
        self.sizes: list[int] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def remove(self, index: int) -> Row:
        row = self.rows[index]
        self.rows[index] = self.rows[-1]
        self.rows.pop()
        return row

    def step(self) -> None:
        self.sizes.append(len(self.rows))
        for row in self.rows:
            row.add(3, "plain")
            row.stats.steps += 1
            if row.request == 9:
                raise RuntimeError("broken")


def rows(*rooms: int) -> list[Row]:
    return [
        make_row([1, 2], SamplingParams(max_tokens=room), number=number)
        for number, room in enumerate(rooms)
    ]


def test_a_row_that_ends_makes_room_for_the_next() -> None:
    """Catches rows that wait although there is room, and rows above the bound."""
    decoder = Counting()
    steps = [[row.request for row in stepped] for stepped in run_rows(decoder, rows(1, 3, 1), 2)]
    assert steps == [[0, 1], [1, 2], [1]]
    assert decoder.sizes == [2, 2, 1]


def test_times_are_split_at_the_first_token() -> None:
    (row,) = rows(3)
    seen = [
        (row.stats.ttft_s, row.stats.ttft_s + row.stats.decode_s)
        for _ in run_rows(Counting(), [row])
    ]
    assert len({first for first, _ in seen}) == 1, "the first token came once"
    assert seen == sorted(seen)
    assert seen[0][0] == seen[0][1]


def test_whoever_is_over_is_the_callers_to_say() -> None:
    decoder = Counting()
    for row in rows(8, 8):
        decoder.add(row)
    for _ in run_rows(decoder, [], is_over=lambda row: len(row.output) >= 2):
        pass
    assert decoder.sizes == [2, 2]


def test_no_row_stays_after_an_error_or_an_early_end() -> None:
    """Catches rows that the next call would find in the batch."""
    decoder = Counting()
    steps = run_rows(decoder, rows(5, 5))
    next(steps)
    steps.close()
    assert not decoder.rows
    with pytest.raises(RuntimeError, match="broken"):
        list(run_rows(decoder, [make_row([1], SamplingParams(max_tokens=5), number=9)]))
    assert not decoder.rows
