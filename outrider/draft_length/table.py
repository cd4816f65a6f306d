"""The draft length by load: a table that was measured beforehand (`outrider tune` writes one), the same for every row of a step.

Between two entries the one for fewer rows holds, as in vLLM's `num_speculative_tokens_per_batch_size`. Unlike `Goodput` it
measures nothing while it runs: a seeded text depends on it only through the number of rows beside it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from outrider.rows import Rows
from outrider.step import StepFacts


class LengthByRows:
    """`--num-draft-tokens 1:5,4:3,16:0`."""

    def __init__(self, table: Sequence[tuple[int, int]]) -> None:
        """`table`: (rows, nodes from so many rows on), ascending, the first at 1 row; 0 nodes: plain decoding."""
        self._starts, self._sizes = [start for start, _ in table], [size for _, size in table]

    def choose(self, rows: Rows) -> list[int]:
        """Draft tokens wanted for each row."""
        size = self._sizes[bisect_right(self._starts, len(rows)) - 1]
        return [row.clamp_draft(size) for row in rows]

    def observe(self, facts: StepFacts) -> None:
        """Nothing to learn."""

    def summary(self) -> dict[str, Any]:
        """The table."""
        return {"by_load": dict(zip(self._starts, self._sizes, strict=True))}
