"""Draft lengths that were decided beforehand, less only where a row is about to end.

The one token a step emits beyond the draft needs room too, so a row with r tokens left is never
sent more than r - 1. That depends on lengths alone, never on a drafted token's value, so it cannot
bias the output.

By load there is a table (`outrider tune` writes one), the same for every row of a step. Between two
entries the one for fewer rows holds, as in vLLM's `num_speculative_tokens_per_batch_size`. Unlike
`Goodput` it measures nothing while it runs: a seeded text depends on it only through the number of
other rows of the batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from outrider.rows import Rows
from outrider.step import StepFacts


class FixedLength:
    """`--num-draft-tokens N`, or by load `1:5,4:3,16:0`."""

    def __init__(self, gamma: int, by_rows: Sequence[tuple[int, int]] = ()) -> None:
        """`by_rows`: (rows, nodes from this many rows on), ascending, the first at 1 row; 0 nodes:
        plain decoding."""
        self.gamma = gamma
        self._by_rows = dict(by_rows)

    def choose(self, rows: Rows) -> list[int]:
        """Draft tokens wanted for each row."""
        starts = list(self._by_rows)
        size = self._by_rows[starts[bisect_right(starts, len(rows)) - 1]] if starts else self.gamma
        return [row.clamp_draft(size) for row in rows]

    def observe(self, facts: StepFacts) -> None:
        """Nothing to learn."""

    def summary(self) -> dict[str, Any]:
        """The length that was asked for, or the table."""
        return {"by_load": dict(self._by_rows)} if self._by_rows else {"fixed": self.gamma}
