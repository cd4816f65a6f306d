"""`--num-draft-tokens auto`: each step asks for as many nodes as bring the most tokens per second
(`goodput.py`).

Each drafter of a batch has its own `Goodput`: a request whose drafts are look-ups must not teach
the server what its draft model is worth. All rows share the step, so each gets the number of all
rows. Verdicts teach the one that drafted, the clock only where all rows of a step have the same
drafter.

Lengths follow the clock, so a seeded sampled text repeats only with the drafter-invariant verifier
(`gumbel`). Its distribution is the target's regardless: what is chosen depends on earlier steps
only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from outrider.draft_length.goodput import Goodput, ObservedStep
from outrider.draft_length.reading import ReadingPrice
from outrider.draft_length.survival import Phase
from outrider.rows import Row, Rows
from outrider.step import StepFacts

# that are drafted for where drafting does not pay: each may have a long text to be read first
PROBED_ROWS = 4


class AutoLength:
    """`drafters`: by what rows call their drafter (`Row.drafter`), the first one also for rows that
    name none.

    `reading`: what reading prompts costs them; None: nothing is known of it."""

    def __init__(
        self, drafters: Mapping[str, Goodput], reading: ReadingPrice | None = None
    ) -> None:
        self.drafters = dict(drafters)
        self.reading = reading
        self._first = next(iter(self.drafters))
        self._asked: list[int] = []  # of the present step
        self._rows: dict[str, list[int]] = {}  # of the present step, by drafter
        # the same: what was chosen for rows without a number of their own
        self._sizes: dict[str, int] = {}
        self._phases: list[Phase] = []  # of the present step's rows
        self._context = 0  # tokens of their texts
        self._timed_s = 0.0  # of all steps that the clock teaches

    def choose(self, rows: Rows) -> list[int]:
        """Nodes wanted for each row."""
        if self.reading is not None:
            self.reading.look(rows, self.name_of)
            for name, goodput in self.drafters.items():
                goodput.reading_s = self.reading.per_token_s(name)
                goodput.unread_s = self.reading.unread_s(name)
        self._rows = {}
        self._sizes = {}
        self._asked = [0] * len(rows)
        self._phases = [Phase.at(len(row.tokens), thinks=row.thinks) for row in rows]
        self._context = sum([len(row.tokens) for row in rows])
        for index, row in enumerate(rows):
            self._rows.setdefault(self.name_of(row), []).append(index)
        for name, indices in self._rows.items():
            goodput = self.drafters[name]
            left = len(rows)
            if not all([rows[index].draft_fixed for index in indices]):
                phases = [self._phases[index] for index in indices]
                shares = {phase: phases.count(phase) / len(phases) for phase in set(phases)}
                self._sizes[name] = goodput.next_size(len(rows), shares, self._context)
                if not goodput.settled(len(rows)):
                    left = PROBED_ROWS
            for index in indices:
                fixed = rows[index].draft_fixed
                if fixed or left:
                    self._asked[index] = rows[index].clamp_draft(self._sizes.get(name, 0))
                    left -= not fixed and self._asked[index] > 0
        rows.prices = ()  # what nodes must bring
        if len(rows) == 1 and self._sizes:  # a pass of several is as wide as its widest
            (name,) = self._sizes
            rows.prices = self.drafters[name].prices(1)
        return self._asked

    def drop_unready(self, rows: Rows, ready: list[int]) -> list[int]:
        """The lengths asked for where only `ready` rows can be drafted for: nothing in rows whose
        texts are not read yet, and nothing at all for a drafter with too many of them for drafting
        the others to pay."""
        for name, indices in self._rows.items():
            asking = [
                index for index in indices if self._asked[index] and not rows[index].draft_fixed
            ]
            able = [index for index in asking if ready[index]]
            if len(able) < len(asking) and not self.drafters[name].pays_for(
                len(able), len(asking), len(rows)
            ):
                ready = [0 if index in asking else count for index, count in enumerate(ready)]
        return ready

    def observe(self, facts: StepFacts) -> None:
        """A step is over."""
        rows = facts.rows
        lists = facts.verdict.lists
        budgets = facts.draft.budgets
        # a first step reads the prompt, too
        timed = (
            len(self._rows) == 1
            and not facts.has_forced
            and all([row.stats.steps > 1 for row in rows])
        )
        seconds = facts.seconds if timed else None
        self._timed_s += seconds or 0.0
        for name, indices in self._rows.items():
            self.drafters[name].learn(
                ObservedStep(
                    len(rows),
                    self._sizes.get(name),
                    facts.asked,
                    facts.drafted,
                    lists,
                    budgets,
                    seconds,
                    indices,
                    self._phases,
                    self._context,
                    facts.experts,
                )
            )
        if self.reading is not None:
            self.reading.ended(rows, self.name_of)

    def summary(self) -> dict[str, Any]:
        """The first drafter's report, with the lengths that all chose and the seconds of timed steps.

        Where there are several drafters, each one's own report stands below `by_drafter`.
        """
        each = {name: goodput.summary() for name, goodput in self.drafters.items()}
        first = {**each[self._first], "timed_s": self._timed_s}
        if len(each) == 1:
            return first
        chosen: Counter[int] = sum(
            (Counter(drafter["chosen"]) for drafter in each.values()), Counter()
        )
        return {**first, "chosen": dict(sorted(chosen.items())), "by_drafter": each}

    def name_of(self, row: Row) -> str:
        """The name in `drafters` of a row's drafter."""
        return self._first if row.drafter is None else row.drafter
