"""What the coming steps ask for, decided for several at once: a model's pass drives this code out of the processor's caches, and
to decide afresh in each step costs a fiftieth of a short one."""

from __future__ import annotations

from collections.abc import Sequence


class Plans:
    """By number of rows, which changes from step to step under load."""

    def __init__(self) -> None:
        self._left: dict[int, list[int]] = {}  # sizes, the next one last

    def next(self, num_rows: int) -> int | None:
        """The planned size of the coming step of so many rows; None: nothing is planned for it."""
        left = self._left.get(num_rows)
        return left.pop() if left else None

    def make(self, num_rows: int, sizes: Sequence[int]) -> None:
        """Of the coming steps of so many rows, in order."""
        self._left[num_rows] = list(reversed(sizes))

    def drop(self) -> None:
        """What they were decided by is no longer believed."""
        self._left.clear()
