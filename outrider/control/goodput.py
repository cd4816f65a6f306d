"""`--num-draft-tokens auto`: each step drafts as many nodes as bring the most tokens per second, none included.

    goodput(n) = (rows + expected kept tokens of n nodes each) / seconds of a step with n nodes

(SmartSpec, Liu et al. 2406.14066; the chain's marginal form is DSpark's scheduler.) Both sides are measured while running:
`costs.py`, `survival.py`. All rows get the same n: a target pass is as wide as its widest row, so a shorter row would save
nothing; a row close to its end gets what it has room for.

Reversible and steady: a change must promise MARGIN more than the present choice; after a while without drafts a few steps
try again, more and more rarely as they keep failing; now and then one plain step keeps the baseline honest.

Lengths follow the clock, so a seeded sampled text repeats only with the drafter-invariant verifier (`gumbel`). Its law is
the target's regardless: what is chosen depends on earlier steps only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from outrider.control.costs import CostCurve
from outrider.rows import Row, Rows
from outrider.survival import ChainSurvival, TreeYield
from outrider.types import Draft, Verdict

MARGIN = 0.03  # predicted gain that a change of length must promise
FIRST_PAUSE, LONGEST_PAUSE = 24, 384  # steps without drafts before the next try
TRIES = 2  # steps of one try
PLAIN_EVERY = 200  # steps between two plain ones while drafting pays
TREE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


class Goodput:
    """See the module docstring. `most`: the largest number of nodes per row."""

    def __init__(self, most: int, *, trees: bool) -> None:
        self.most = most
        sizes = [size for size in TREE_SIZES if size < most] if trees else range(1, most)
        self._sizes = [0, *sizes, most]
        self._yield: ChainSurvival | TreeYield = TreeYield() if trees else ChainSurvival()
        self._costs: dict[int, CostCurve] = {}  # by number of rows
        self._plan: list[int] = self._first_steps()
        self._current = most  # of the last step
        self._settled = self._middle()  # what goodput last asked for, tries aside
        self._steps = self._silent = 0
        self._pause = FIRST_PAUSE
        self.chosen: Counter[int] = Counter()

    def choose(self, rows: Rows) -> list[int]:
        """Nodes wanted for each row."""
        self._yield.forget({id(row) for row in rows})
        self._current = self._next(rows)
        self.chosen[self._current] += 1
        return [max(0, min(self._current, row.room - 1)) for row in rows]

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """A step is over. `seconds`: its time without the prefill of new prompts."""
        drafted = draft.lists[1]
        if all(row.stats.steps > 1 for row in rows):  # a row's first step also reads its prompt into the draft
            self._curve(len(rows)).observe(max(drafted), seconds)
        for row, length, accepted in zip(rows, drafted, verdict.lists.num_accepted, strict=True):
            if length:
                self._yield.observe(id(row), length, accepted)

    def goodput(self, num_nodes: int, rows: Iterable[Row]) -> float | None:
        """Predicted tokens per second of a step with `num_nodes` for every row; None before anything was measured."""
        batch = list(rows)
        seconds = self._curve(len(batch)).seconds(num_nodes)
        if seconds is None:
            return None
        return sum(1 + self._yield.expected(num_nodes, id(row)) for row in batch) / seconds

    def summary(self) -> dict[str, Any]:
        """What was measured and chosen, and by how much the best fixed length is predicted to beat the mix (regret)."""
        report: dict[str, Any] = {"chosen": dict(sorted(self.chosen.items())), "by_rows": {}}
        for num_rows, curve in self._costs.items():
            rates = {
                size: num_rows * (1 + self._yield.expected(size)) / seconds
                for size in self._sizes
                if (seconds := curve.seconds(size))
            }
            if rates:
                best = max(rates, key=lambda size: rates[size])
                report["by_rows"][num_rows] = {
                    "seconds": curve.known(), "tokens_per_s": rates, "best_fixed": best, "regret": self._regret(rates, best),
                }  # fmt: skip
        return report

    # ---------------------------------------------------------------- choosing

    def _next(self, rows: Rows) -> int:
        self._steps += 1
        if self._plan:
            return self._plan.pop(0)
        best = self._settled = self._best(rows)
        if best:
            self._silent = 0
            if self._steps % PLAIN_EVERY == 0:
                return 0
            self._pause = FIRST_PAUSE
            return best
        self._silent += 1
        if self._silent >= self._pause:
            self._silent, self._pause = 0, min(2 * self._pause, LONGEST_PAUSE)
            self._plan = [self._middle()] * (TRIES - 1)
            return self._middle()
        return 0

    def _best(self, rows: Rows) -> int:
        """The length with the most goodput, or the one settled on when it is nearly as good."""
        rates = {size: self.goodput(size, rows) or 0.0 for size in self._sizes}
        best = max(self._sizes, key=lambda size: (rates[size], -size))
        return best if rates[best] > (1 + MARGIN) * rates[self._settled] else self._settled

    def _first_steps(self) -> list[int]:
        """A few sizes across the range, twice: enough for a line and a first survival curve. The plain one once more."""
        return [self._middle(), self.most, 0, self._middle(), self.most, 0, 0]

    def _middle(self) -> int:
        return self._sizes[(len(self._sizes) + 1) // 2]

    def _curve(self, num_rows: int) -> CostCurve:
        return self._costs.setdefault(num_rows, CostCurve())

    def _regret(self, rates: dict[int, float], best: int) -> float:
        """1 - (mean goodput of what was chosen) / (goodput of the best fixed length), both as predicted now."""
        steps = sum(count for size, count in self.chosen.items() if size in rates)
        if not steps:
            return 0.0
        tokens = {size: 1 + self._yield.expected(size) for size in rates}
        time = sum(count * tokens[size] / rates[size] for size, count in self.chosen.items() if size in rates)
        mixed = sum(count * tokens[size] for size, count in self.chosen.items() if size in rates) / time
        return 1 - mixed / rates[best]
