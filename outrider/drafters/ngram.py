"""Prompt lookup: copy what followed the same few tokens the last time they were written.

Wins wherever the answer repeats its prompt or itself: summaries, edits, code, quoted passages. The longest n-gram of the
text's end is looked up, from `max_ngram` tokens down to `min_ngram`; among its earlier occurrences the most recent counts,
and what followed it is copied; a copy that reaches the end of the text goes on with itself. (The original, PLD by Saxena,
takes the first occurrence and skips short copies; recency and short copies find more.)

Costs a few dictionary look-ups per step: each n-gram ending is indexed once, when its text is committed.
"""

from __future__ import annotations

import torch

from outrider.drafters.base import Drafter
from outrider.errors import ConfigError
from outrider.rows import Row, Rows
from outrider.types import Draft, TargetOutput, Verdict


class _Index:
    """Where each n-gram of one text was last followed by something."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token that followed it
        self._indexed = 0  # tokens [0, _indexed) have been entered as followers

    def update(self, tokens: list[int]) -> None:
        """Enter every n-gram that is followed by a token not seen before."""
        for follower in range(max(self._indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= follower:
                    self._next[tuple(tokens[follower - size : follower])] = follower
        self._indexed = len(tokens)

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the longest known end of the text. A copy may run into itself."""
        for size in self._sizes:
            start = self._next.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                copied: list[int] = []
                for source in range(start, start + count):
                    copied.append(tokens[source] if source < len(tokens) else copied[source - len(tokens)])
                return copied
        return []


class NgramDrafter(Drafter):
    """n-gram prompt lookup over the row's own prompt and output."""

    def __init__(self, min_ngram: int = 2, max_ngram: int = 4) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(f"ngram sizes must satisfy 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self._sizes = (min_ngram, max_ngram)
        self._indexes: list[_Index] = []

    def start(self, row: Row) -> None:
        self._indexes.append(_Index(*self._sizes))
        self._indexes[-1].update(row.tokens)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        found = [
            index.continuation(row.tokens, count)
            for index, row, count in zip(self._indexes, rows, gamma, strict=True)
        ]
        width = max((len(copy) for copy in found), default=0)
        padded = [copy + [0] * (width - len(copy)) for copy in found]
        return Draft(
            tokens=torch.tensor(padded, dtype=torch.int64, device=rows.device).view(len(rows), width),
            lengths=torch.tensor([len(copy) for copy in found], device=rows.device),
        )

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        for index, row in zip(self._indexes, rows, strict=True):
            index.update(row.tokens)

    def stop(self, index: int) -> None:
        self._indexes[index] = self._indexes[-1]
        self._indexes.pop()
