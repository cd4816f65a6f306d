"""Another model's cache, looked at with lengths of one's own: how a truncated model drafts on the
target's keys and values.

    row b of the target   [ committed: 0 .. parent.lengths[b] )[ scratch: the next pass overwrites it )
    the same row here     [ the same                           )[ draft tokens so far )

A view owns no memory. It reads what the target committed and writes after that, where the target's
next pass, which feeds the pending token and the whole draft, writes again before it reads. So a
draft leaves nothing behind, and the view never changes the target's own lengths.
"""

from __future__ import annotations

from torch import Tensor

from outrider.kv.cache import KVCache


class BorrowedCache(KVCache):
    """Rows in the memory of another cache, with lengths of their own."""

    def __init__(self, parent: KVCache) -> None:  # no super().__init__: nothing is allocated
        self.parent = parent
        self.layers = parent.layers
        self.dtype = parent.dtype
        self.device = parent.device
        self.window = parent.window
        self._layer_bytes = parent._layer_bytes
        self._window_bytes = parent._window_bytes
        self.lengths = []

    @property  # always the parent's present stores: it replaces them when it grows
    def keys(self) -> list[Tensor]:  # type: ignore[override]
        return self.parent.keys

    @property
    def values(self) -> list[Tensor]:  # type: ignore[override]
        return self.parent.values

    @property
    def bases(self) -> list[int]:  # type: ignore[override]
        return self.parent.bases

    @property
    def firsts(self) -> list[int]:  # type: ignore[override]
        return self.parent.firsts

    @property
    def skipped(self) -> list[int]:  # type: ignore[override]
        return self.parent.skipped

    @property
    def capacity(self) -> int:
        return self.parent.capacity

    @property
    def window_capacity(self) -> int:
        return self.parent.window_capacity

    @property
    def allocated_bytes(self) -> int:
        return 0

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room in the parent."""
        self.parent.reserve(max(num_rows, self.parent.num_rows), num_tokens)


class KVView(BorrowedCache):
    """A draft's view of the target's cache: it reads the target's keys and writes after them.

    Rows join and leave after the parent's, which moves the contents.
    """

    def follow(self) -> None:
        """Forget the draft: every row is as long as the parent has committed it."""
        self.lengths = self.parent.lengths[: self.num_rows]

    def make_room(self, first_row: int, num_rows: int, width: int) -> None:
        """Make room in the parent, which holds what windows reach from what it has committed."""
        rows = slice(first_row, first_row + num_rows)
        self.parent.slide(first_row, self.parent.lengths[rows], self.lengths[rows], width)

    def add_row(self) -> int:
        """The row that joined the parent joins here."""
        self.lengths.append(self.parent.lengths[self.num_rows])
        return self.num_rows - 1

    def swap_remove(self, row: int) -> None:
        """Drop a row; the last row takes its place. Its contents are the parent's to move."""
        self.lengths[row] = self.lengths[-1]
        self.lengths.pop()

    def scrub(self) -> None:
        """Zero everything the parent has not committed, drafts included."""
        self.parent.scrub()
        self.follow()

    def check_integrity(self) -> None:
        """Raise AssertionError when view and parent contradict each other. For tests and idle
        moments."""
        self.parent.check_integrity()
        assert self.num_rows == self.parent.num_rows, (
            f"{self.num_rows} rows on a cache of {self.parent.num_rows}"
        )
        for row, (length, committed) in enumerate(
            zip(self.lengths, self.parent.lengths, strict=True)
        ):
            assert committed <= length <= self.capacity, (
                f"row {row}: length {length} outside [{committed}, {self.capacity}]"
            )
