"""One control for each drafter of a batch, since what one has learned says little of another: a request that is drafted for by
look-up must not teach the server what its draft model is worth, nor what that model's steps cost.

All rows share the step, so each control is told how many rows there are in all, and decides for its own. Verdicts teach the
control of the row they are about. The clock teaches only where all rows of a step have the same drafter: of a mixed step nobody
can say who cost what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from outrider.control.goodput import Goodput
from outrider.rows import Rows
from outrider.types import Draft, Verdict


class EachDrafter:
    """`controls`: by what rows call their drafter (`Row.drafter`), the first one also for rows that name none."""

    def __init__(self, controls: Mapping[str, Goodput]) -> None:
        self.controls = dict(controls)
        self._first = next(iter(self.controls))
        self._owners: list[str] = []  # of the present step, by row
        self._asked: list[int] = []

    def choose(self, rows: Rows) -> list[int]:
        """Nodes wanted for each row."""
        self._owners = [self._first if row.drafter is None else row.drafter for row in rows]
        free = [name for row, name in zip(rows, self._owners, strict=True) if not row.draft_fixed]  # others have their own number
        sizes = {name: self.controls[name].next_size(len(rows)) for name in dict.fromkeys(free)}
        self._asked = [row.wish(sizes.get(name, 0)) for row, name in zip(rows, self._owners, strict=True)]
        return self._asked

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """A step is over. `seconds`: its time without the prefill of new prompts."""
        names, columns = dict.fromkeys(self._owners), (self._asked, draft.lists[1], verdict.lists.num_accepted)
        timed = len(names) == 1 and all(row.stats.steps > 1 for row in rows)
        for name in names:
            mine = [index for index, owner in enumerate(self._owners) if owner == name]
            asked, drafted, accepted = ([column[index] for index in mine] for column in columns)
            self.controls[name].learn(len(rows), asked, drafted, accepted, seconds if timed else None)

    def learn_pause(self, num_rows: int, seconds: float) -> None:
        """What passed between two steps of so many rows, whoever drafts."""
        for control in self.controls.values():
            control.learn_pause(num_rows, seconds)

    def summary(self) -> dict[str, Any]:
        """Of the first drafter, with the lengths that all of them chose; each one's own below `by_drafter`."""
        each = {name: control.summary() for name, control in self.controls.items()}
        chosen: Counter[int] = sum((Counter(one["chosen"]) for one in each.values()), Counter())
        return {**each[self._first], "chosen": dict(sorted(chosen.items())), "by_drafter": each}
