"""A fixed number of draft tokens every step, less only where a row is about to end.

The one token a step emits beyond the draft needs room too, so a row with r tokens left is never sent more than r - 1. That
depends on lengths alone, never on a drafted token's value, so it cannot bias the output.
"""

from __future__ import annotations

from typing import Any

from outrider.rows import Rows
from outrider.step import StepFacts


class FixedLength:
    """`--num-draft-tokens N`."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def choose(self, rows: Rows) -> list[int]:
        """Draft tokens wanted for each row."""
        return [row.clamp_draft(self.gamma) for row in rows]

    def observe(self, facts: StepFacts) -> None:
        """Nothing to learn."""

    def summary(self) -> dict[str, Any]:
        """The length that was asked for."""
        return {"fixed": self.gamma}
