"""All positions of a large token text where the same few tokens stand, found by binary search: a
suffix array of fixed depth.

The positions of the text are sorted by the `DEPTH` tokens that follow them, so every n-gram of up
to `DEPTH` tokens owns one run of the order. Sorting is prefix doubling (Manber, Myers 1990) in
NumPy: ranks by one token, then by 2, 4, ... tokens, each from the one before. A lookup never needs
more than `DEPTH` tokens, so it stops there.

    text     a b c a b d          order of "a b":  positions 0 and 3, then continued by c and by d

Documents are separated by `SEPARATOR`, which no query holds, so no match crosses from one to the
next. Kept in memory: 8 bytes per token (the tokens, and the order, 4 each). Building takes about 40
bytes per token while it runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

DEPTH = 32  # tokens by which positions are sorted; queries may be this long
SEPARATOR = 0xFFFFFFFF  # stands after each document
MAX_TOKENS = 2**31 - 1  # positions are int32

# big-endian: comparing the bytes of two slices compares their tokens, in one memcmp
TOKEN = np.dtype(">u4")


class SuffixArray:
    """Tokens and the sorted order of their positions. Read-only once built."""

    def __init__(self, tokens: np.ndarray, order: np.ndarray) -> None:
        self.tokens = tokens  # (n,) TOKEN
        self.order = order  # (n,) int32
        self._bytes = tokens.view(np.uint8).data

    @classmethod
    def build(cls, tokens: np.ndarray) -> SuffixArray:
        """From a text (n,) of token ids with `SEPARATOR` after each document; n must not exceed
        MAX_TOKENS."""
        return cls(tokens.astype(TOKEN), _sorted_positions(tokens))

    def find(self, query: Sequence[int]) -> np.ndarray:
        """(k,) int32: the positions right after each occurrence of the query, in the order of what
        follows them."""
        wanted = np.array(query, dtype=TOKEN).tobytes()
        width = 4 * len(query)
        data = self._bytes

        def head(position: int) -> bytes:
            start = 4 * int(position)
            return data[start : start + width].tobytes()

        first = bisect_left(self.order, wanted, key=head)
        last = bisect_right(self.order, wanted, lo=first, key=head)
        return self.order[first:last] + np.int32(len(query))

    def longest_match(self, tail: Sequence[int], shortest: int) -> int:
        """Length of the longest end of `tail` that occurs in the text; 0 when that is less than
        `shortest`.

        If an end of m tokens occurs, so does every shorter one: the length itself is found by
        bisection.
        """
        known = shortest - 1
        impossible = len(tail) + 1
        while impossible - known > 1:
            length = (known + impossible) // 2
            if len(self.find(tail[len(tail) - length :])):
                known = length
            else:
                impossible = length
        return known if known >= shortest else 0

    def followers(self, positions: np.ndarray, count: int) -> np.ndarray:
        """(k, count) int64: the tokens from each position on; -1 from the end of its document on."""
        columns = positions[:, None].astype(np.int64) + np.arange(count)
        inside = columns < len(self.tokens)
        found = self.tokens[np.where(inside, columns, 0)].astype(np.int64)
        ended = np.logical_or.accumulate((found == SEPARATOR) | ~inside, axis=1)
        return np.where(ended, -1, found)


def _sorted_positions(tokens: np.ndarray) -> np.ndarray:
    """(n,) int32: positions by the DEPTH tokens that follow; equals stay in text order."""
    if not len(tokens):
        return np.empty(0, dtype=np.int32)
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    order = np.argsort(ranks, kind="stable")
    width = 1
    while width < DEPTH and ranks.max() < len(tokens) - 1:
        second = np.zeros_like(ranks)  # rank of the next `width` tokens, 0 after the end
        second[: len(tokens) - width] = ranks[width:] + 1
        keys = ranks * (len(tokens) + 1) + second
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        ranks[order] = np.concatenate([[0], np.cumsum(keys[1:] != keys[:-1])])
        width *= 2
    return order.astype(np.int32)
