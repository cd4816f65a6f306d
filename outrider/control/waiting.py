"""Steps that the control has not learned from yet. They are learned from together: a model's pass drives this code out of the
processor's caches, so what is done in each step costs several times what it costs in a loop over many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outrider.survival import Outcome
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

    @property
    def num_rows(self) -> int:
        """All that there were."""
        return len(self.asked)

    def counts(self) -> tuple[Sequence[int], Sequence[int]]:
        """Nodes asked for and nodes drafted, per row."""
        return self._mine(self.asked), self._mine(self.drafted)

    def error(self, expected: Mapping[int, float]) -> float | None:
        """Kept nodes less expected ones, a mean over the rows that were offered something. `expected`: by nodes asked for. None
        where nothing was offered, or it is not known what to expect."""
        asked, drafted = self.counts()
        offered = len(drafted) - drafted.count(0)
        hope = expected.get(max(asked))
        return sum(self._mine(self.verdict.num_accepted)) / offered - hope if offered and hope is not None else None

    def outcomes(self) -> list[Outcome]:
        """Of the rows that were offered something."""
        _, accepted, _, ran_out = self.verdict
        columns = self.asked, accepted, ran_out, self._kept_budgets()
        lines = zip(self._mine(self.drafted), *map(self._mine, columns), strict=True)
        return [Outcome(*outcome) for drafted, *outcome in lines if drafted]

    def _kept_budgets(self) -> Sequence[tuple[int, ...] | None]:
        """Of every row's kept nodes, in order: how much must be asked for to get them. None where the drafter does not say."""
        if self.budgets is None:
            return [None] * len(self.asked)
        kept = zip(self.budgets, self.verdict.path, self.verdict.num_accepted, strict=True)
        return [None if known is None else tuple([known[node] for node in path[:count]]) for known, path, count in kept]

    def _mine(self, column: Sequence[Any]) -> Sequence[Any]:
        return column if self.mine is None else [column[row] for row in self.mine]


def by_rows(steps: Sequence[Step]) -> dict[int, list[Step]]:
    """The same by their number of rows."""
    found: dict[int, list[Step]] = {}
    for step in steps:
        found.setdefault(len(step.asked), []).append(step)
    return found


def chosen(steps: Sequence[Step]) -> Counter[int]:
    """How often each size was chosen for all rows."""
    return Counter([step.size for step in steps if step.size is not None])
