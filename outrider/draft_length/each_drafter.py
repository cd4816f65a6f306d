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

from outrider.draft_length.goodput import Goodput
from outrider.rows import Rows
from outrider.types import Draft, Verdict


class EachDrafter:
    """`controls`: by what rows call their drafter (`Row.drafter`), the first one also for rows that name none."""

    def __init__(self, controls: Mapping[str, Goodput]) -> None:
        self.controls = dict(controls)
        self._first = next(iter(self.controls))
        self._owners: list[str] = []  # of the present step, by row
        self._asked: list[int] = []
        self._free: dict[str, list[int]] = {}  # of the present step: whose length is chosen here, by owner

    def choose(self, rows: Rows) -> list[int]:
        """Nodes wanted for each row."""
        self._owners = [self._name(row.drafter) for row in rows]
        self._asked = [row.wish(0) for row in rows]  # what rows ask for that have their own number
        self._free = {}
        for index, (row, name) in enumerate(zip(rows, self._owners, strict=True)):
            if not row.draft_fixed:
                self._free.setdefault(name, []).append(index)
        for name, indices in self._free.items():
            for index, count in zip(indices, self.controls[name].ask([rows[i] for i in indices], len(rows)), strict=True):
                self._asked[index] = count
        return self._asked

    def waive(self, ready: list[int]) -> list[int]:
        """What is asked for where `ready` can be drafted of it: nothing in rows whose texts are not read yet, and nothing at all
        for a drafter with so many of them that drafting for the others does not pay."""
        for name, indices in self._free.items():
            mine = [index for index in indices if self._asked[index]]
            able = [index for index in mine if ready[index]]
            if len(able) < len(mine) and not self.controls[name].pays_for(len(able), len(mine), len(self._owners)):
                ready = [0 if index in mine else count for index, count in enumerate(ready)]
        self._asked = ready
        return ready

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """A step is over. `seconds`: its time without the prefill of new prompts."""
        names = dict.fromkeys(self._owners)
        timed = len(names) == 1 and all(row.stats.steps > 1 for row in rows)
        for name in names:
            mine = [index for index, owner in enumerate(self._owners) if owner == name]
            self.controls[name].learn(
                self._asked, draft.lists[1], verdict.lists, draft.budgets, seconds if timed else None, mine
            )  # fmt: skip

    def learn_pause(self, num_rows: int, seconds: float) -> None:
        """What passed between two steps of so many rows, whoever drafts."""
        for control in self.controls.values():
            control.learn_pause(num_rows, seconds)

    def learn_reading(self, drafter: str | None, seconds_per_token: float) -> None:
        """What it costs that this drafter reads texts, per token of their answers."""
        self.controls[self._name(drafter)].learn_reading(seconds_per_token)

    def learn_unread(self, seconds: Mapping[str | None, float]) -> None:
        """What it would take each drafter to read all that it has not read."""
        for drafter, value in seconds.items():
            self.controls[self._name(drafter)].learn_unread(value)

    def summary(self) -> dict[str, Any]:
        """Of the first drafter, with the lengths that all of them chose; each one's own below `by_drafter`."""
        each = {name: control.summary() for name, control in self.controls.items()}
        chosen: Counter[int] = sum((Counter(one["chosen"]) for one in each.values()), Counter())
        return {**each[self._first], "chosen": dict(sorted(chosen.items())), "by_drafter": each}

    def _name(self, drafter: str | None) -> str:
        return self._first if drafter is None else drafter
