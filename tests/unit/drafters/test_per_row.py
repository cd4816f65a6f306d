"""What drafters keep for each row leaves with the row."""

from __future__ import annotations

from outrider.drafters.base import Drafter
from outrider.rows import PerRow, Rows
from outrider.types import Draft


class Keeping(Drafter):
    """Two things for each row, one for all of them."""

    def __init__(self) -> None:
        self.names, self.sizes, self.shared = PerRow("abcd"), PerRow([1, 2, 3, 4]), ["x", "y", "z", "w"]

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        return Draft.empty(len(rows), rows.device)


def test_the_last_row_takes_the_slot_of_one_that_leaves() -> None:
    """Catches a drafter that answers for its neighbour's text, and the last row, which has nobody to take its slot."""
    drafter = Keeping()
    drafter.stop(1)
    assert (drafter.names, drafter.sizes) == (["a", "d", "c"], [1, 4, 3])
    drafter.stop(2)
    assert (drafter.names, drafter.sizes) == (["a", "d"], [1, 4])
    assert drafter.shared == ["x", "y", "z", "w"]


def test_who_leaves_is_returned() -> None:
    assert [PerRow("abc").swap_remove(index) for index in range(3)] == ["a", "b", "c"]
