"""States of texts seen before, for prompts that begin like them: `pages.py` for rows that cannot be
cut.

Those are in `states.py` and `state_slots.py`.

A state serves a text that begins with all of its tokens, and only as a whole. So one is kept where
a prompt was read as far as a boundary, and where a text ended; of the boundaries on the way to a
longer one those stay that are powers of two, for other texts that share no more than a beginning.
Least recently used states go first when there is no room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from outrider.kv.cache import BLOCK, KVCache
from outrider.kv.state_slots import PackedStates, StateSlots
from outrider.kv.states import Packed, StateCache

Tokens = tuple[int, ...]


class StatePool:
    """States at the ends of texts' beginnings seen before.

    `page`: states are kept at multiples of this many tokens; `num_pages` of them may be kept, a state
    of N tokens counting as N, at least as `BLOCK`.
    """

    def __init__(self, *, page: int, num_pages: int) -> None:
        self.page = page
        self.num_pages = num_pages
        self.queries = self.hits = 0  # prompt tokens looked up, and found
        self.clear()

    @property
    def used(self) -> int:
        """Pages in use."""
        return -(-sum(map(_cost, self._kept)) // self.page)

    def known(self, tokens: Sequence[int]) -> int:
        """Tokens that `load` would fill in."""
        return len(self._find(tokens) or ())

    def load(
        self, tokens: Sequence[int], cache: KVCache, row: int, max_length: int | None = None
    ) -> int:
        """Fill an empty row with the longest known beginning of `tokens`, at most `max_length`;
        returns its number of tokens."""
        entry = self._find(tokens[:max_length])
        self.queries += len(tokens)
        if entry is None:
            return 0
        self.hits += len(entry)
        self._kept.move_to_end(entry)
        cache.unpack(row, self._kept[entry])
        return len(entry)

    def save(self, tokens: Sequence[int], cache: KVCache, row: int, length: int) -> None:
        """Keep a row's state where it has seen a multiple of `page` tokens, at most `length`;
        `tokens` begin with them."""
        assert isinstance(cache, StateCache | StateSlots)
        reached = cache.reached(row)
        key = tuple(tokens[:reached])
        if (
            not 0 < reached <= length
            or reached % self.page
            or key in self._kept
            or _cost(key) > self.num_pages * self.page
        ):
            return
        self._forget_between(key)
        self._kept[key] = cache.pack(row)
        while self.used > self.num_pages:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        # least recently used first
        self._kept: OrderedDict[Tokens, Packed[Any] | PackedStates] = OrderedDict()

    def check_integrity(self) -> None:
        """Raise AssertionError where a state is of other tokens than its key, or more are kept than
        may be."""
        for key, packed in self._kept.items():
            assert not isinstance(packed, Packed) or packed.tokens == key, "a state of other tokens"
            assert packed.reached == len(key), (
                f"a state of {packed.reached} tokens is kept as one of {len(key)}"
            )
        assert self.used <= self.num_pages, f"{self.used} of {self.num_pages} pages in use"

    def _find(self, tokens: Sequence[int]) -> Tokens | None:
        text = tuple(tokens)
        fitting = [key for key in self._kept if key == text[: len(key)]]
        return max(fitting, key=len, default=None)

    def _forget_between(self, text: Tokens) -> None:
        """Drop the boundaries on the way to `text` that are no powers of two, so that a long prompt
        leaves few states behind."""
        passed = [
            key
            for key in self._kept
            if key == text[: len(key)] and not _is_power(len(key) // self.page)
        ]
        for key in passed:
            del self._kept[key]


def _cost(text: Tokens) -> int:
    """Positions that its state is counted as."""
    return max(BLOCK, len(text))


def _is_power(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0
