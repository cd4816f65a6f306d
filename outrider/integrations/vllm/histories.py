"""Which row of vLLM's batch is which text: by the text itself, for vLLM gives its custom drafters
no request ids.

Between two steps rows change their order, leave, and new ones take theirs. A text is found again by
its tokens: what it had after the last step must be exactly what a row has now without the tokens it
was just given. So it does not matter which of two equal texts a row gets. A text that no row shows
is forgotten at once. A request that was preempted comes back as a new text: its tokens are all
there, and reading them again costs far less than the pass that vLLM makes over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

SPARE = 256  # tokens that a text may grow by before its memory does


@dataclass
class _History:
    """One text as of the last step."""

    tokens: np.ndarray  # (capacity,) int32, `length` of them valid
    length: int

    def equals(self, tokens: np.ndarray) -> bool:
        return self.length == len(tokens) and np.array_equal(self.tokens[: self.length], tokens)

    def append(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self.tokens):
            self.tokens = np.concatenate(
                [
                    self.tokens[: self.length],
                    np.zeros(len(tokens) + self.length // 2 + SPARE, np.int32),
                ]
            )
        self.tokens[self.length : end] = tokens
        self.length = end


class Histories:
    """Texts of the last step, each under a number that it keeps as long as some row shows it in
    every step."""

    def __init__(self) -> None:
        self._numbers = count()
        self._texts: dict[int, _History] = {}
        self._last_numbers: list[int] = []  # row of the last step -> number of its text

    def __len__(self) -> int:
        return len(self._texts)

    def follow(self, rows: Sequence[tuple[np.ndarray, Sequence[int]]]) -> list[int]:
        """The number of each row's text. A row is its tokens (n,) before this step and the tokens
        it got in it; texts of no row are forgotten, rows without a known text get a new number."""
        free = dict(self._texts)
        numbers: list[int] = []
        by_length: dict[int, list[int]] | None = None
        for row, (before, _) in enumerate(rows):
            usual = self._last_numbers[row] if row < len(self._last_numbers) else -1
            if usual in free and free[usual].equals(before):
                number = usual
            else:
                if by_length is None:  # some row is not where it was: needed in few steps
                    by_length = {}
                    for known, text in self._texts.items():
                        by_length.setdefault(text.length, []).append(known)
                candidates = by_length.get(len(before), ())
                number = next(
                    (
                        candidate
                        for candidate in candidates
                        if candidate in free and free[candidate].equals(before)
                    ),
                    -1,
                )
            if number < 0:
                number = next(self._numbers)
                self._texts[number] = _History(before.astype(np.int32), len(before))
            else:
                del free[number]
            numbers.append(number)
        for forgotten in free:
            del self._texts[forgotten]
        for number, (_, emitted) in zip(numbers, rows, strict=True):
            self._texts[number].append(emitted)
        self._last_numbers = numbers
        return numbers
