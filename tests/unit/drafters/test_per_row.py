"""What drafters keep for each row leaves with the row."""

from __future__ import annotations

import pytest

from outrider.drafters.base import Drafter, start_all
from outrider.rows import PerRow, Row, Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from tests.helpers import make_row


class Keeping(Drafter):
    """Two things for each row, one for all of them."""

    def __init__(self) -> None:
        self.names = PerRow("abcd")
        self.sizes = PerRow([1, 2, 3, 4])
        self.shared = ["x", "y", "z", "w"]

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        return Draft.empty(len(rows), rows.device)


def test_the_last_row_takes_the_slot_of_one_that_leaves() -> None:
    """Catches a drafter that answers for its neighbour's text, and the last row, which has nobody
    to take its slot."""
    drafter = Keeping()
    drafter.stop(1)
    assert (drafter.names, drafter.sizes) == (["a", "d", "c"], [1, 4, 3])
    drafter.stop(2)
    assert (drafter.names, drafter.sizes) == (["a", "d"], [1, 4])
    assert drafter.shared == ["x", "y", "z", "w"]


def test_who_leaves_is_returned() -> None:
    assert [PerRow("abc").swap_remove(index) for index in range(3)] == ["a", "b", "c"]


class ByItself(Drafter):
    """Keeps rows where only its own `stop` finds them."""

    def __init__(self, *, raises: bool = False) -> None:
        self.kept: list[int] = []
        self._raises = raises

    def start(self, row: Row) -> None:
        if self._raises:
            raise RuntimeError("no")
        self.kept.append(row.request)

    def stop(self, index: int) -> None:
        del self.kept[index]

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        return Draft.empty(len(rows), rows.device)


def test_a_row_joins_all_drafters_or_none() -> None:
    """Catches a drafter with a row more than the batch, whose every later row is taken for its
    neighbour."""
    rows = [make_row([1, 2], SamplingParams(), number=number) for number in range(2)]
    drafters = [ByItself(), ByItself()]
    start_all(drafters, rows[0], 0)
    with pytest.raises(RuntimeError):
        start_all([*drafters, ByItself(raises=True)], rows[1], 1)
    assert [one.kept for one in drafters] == [[0], [0]]
