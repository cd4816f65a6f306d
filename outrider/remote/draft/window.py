"""Some neighbouring rows of a model's cache as a cache of their own, so that a drafting call works on them alone.

    rows of the cache   0  1  2  3  4  5  6
    the window                [ 0  1  2 ]       a drafter's batch: no idle rows in its passes

A window owns no memory. Its lengths are its own until they are handed back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from outrider.kv import KVCache
from outrider.kv.view import BorrowedCache
from outrider.models.lm import LM


class KVWindow(BorrowedCache):
    """Some rows of a cache, as a cache of their own. Rows neither join nor leave while it is open."""

    def __init__(self, parent: KVCache, first: int, count: int) -> None:
        super().__init__(parent)
        self.first, self.count = first, count
        self.lengths = parent.lengths[first : first + count]

    @property
    def keys(self) -> list[Tensor]:  # type: ignore[override]
        return [store[self.first : self.first + self.count] for store in self.parent.keys]

    @property
    def values(self) -> list[Tensor]:  # type: ignore[override]
        return [store[self.first : self.first + self.count] for store in self.parent.values]

    @property
    def bases(self) -> list[int]:  # type: ignore[override]
        return self.parent.bases[self.first : self.first + self.count]

    @property
    def firsts(self) -> list[int]:  # type: ignore[override]
        return self.parent.firsts[self.first : self.first + self.count]

    def slide(self, first_row: int, committed: Sequence[int], lengths: Sequence[int], width: int) -> None:
        """Forget in the parent."""
        self.parent.slide(self.first + first_row, committed, lengths, width)

    def _set_base(self, row: int, base: int, first: int) -> None:
        self.parent._set_base(self.first + row, base, first)


@contextmanager
def window(lm: LM, first: int, count: int) -> Iterator[KVWindow]:
    """The model works on rows first .. first + count alone; at the end the cache has their new lengths."""
    whole = lm.kv
    opened = KVWindow(whole, first, count)
    lm.kv = opened
    try:
        yield opened
    finally:
        lm.kv = whole
        whole.lengths[first : first + count] = opened.lengths


def swap(kv: KVCache, left: int, right: int) -> None:
    """Two rows of a cache change places."""
    packed = [kv.pack(row) for row in (left, right)]
    for row, content in ((left, packed[1]), (right, packed[0])):
        kv.truncate(row, 0)
        kv.unpack(row, content)
