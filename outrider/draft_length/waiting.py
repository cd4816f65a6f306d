"""Steps that the control has not learned from yet. They are learned from together: a model's pass drives this code out of the
processor's caches, so what is done in each step costs several times what it costs in a loop over many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.draft_length.survival import Outcome
from outrider.types import VerdictLists


class Step(NamedTuple):
    """A step as it was seen: nothing is looked at before it is learned from."""

    size: int | None  # chosen for all rows; None: every one had its own number
    asked: Sequence[int]  # nodes, per row
    drafted: Sequence[int]  # the same
    verdict: VerdictLists
    budgets: Sequence[Sequence[int] | None] | None  # `Draft.budgets`
    seconds: float | None  # None: its time tells nothing
    mine: Sequence[int] | None  # the rows that the control is asked about; None: all

    def counts(self) -> tuple[Sequence[int], Sequence[int]]:
        """Nodes asked for and nodes drafted, per row."""
        if self.mine is None:
            return self.asked, self.drafted
        return [self.asked[row] for row in self.mine], [self.drafted[row] for row in self.mine]

    def error(self, expected: Mapping[int, float]) -> float | None:
        """Kept nodes less expected ones, a mean over the rows that were offered something, as far as `expected` (by nodes asked
        for) knows what they asked for; None where there is none."""
        accepted, asked = self.verdict.num_accepted, self.asked
        errors = [accepted[row] - expected[asked[row]] for row in self._offered() if asked[row] in expected]
        return sum(errors) / len(errors) if errors else None

    def outcomes(self) -> list[Outcome]:
        """Of the rows that were offered something."""
        _, accepted, _, ran_out = self.verdict
        return [Outcome(self.asked[row], accepted[row], ran_out[row], self._kept_budgets(row)) for row in self._offered()]

    def _offered(self) -> list[int]:
        mine = range(len(self.drafted)) if self.mine is None else self.mine
        return [row for row in mine if self.drafted[row]]

    def _kept_budgets(self, row: int) -> tuple[int, ...] | None:
        """Of the row's kept nodes, in order: how much must be asked for to get them. None where the drafter does not say."""
        if self.budgets is None or (known := self.budgets[row]) is None:
            return None
        paths, accepted, *_ = self.verdict
        return tuple([known[node] for node in paths[row][: accepted[row]]])


def by_rows(steps: Sequence[Step]) -> dict[int, list[Step]]:
    """The same by their number of rows."""
    found: dict[int, list[Step]] = {}
    for step in steps:
        found.setdefault(len(step.asked), []).append(step)
    return found


def chosen(steps: Sequence[Step]) -> Counter[int]:
    """How often each size was chosen for all rows."""
    return Counter([step.size for step in steps if step.size is not None])
