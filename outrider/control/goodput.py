"""`--num-draft-tokens auto`: each step asks for as many nodes as bring the most tokens per second, none included.

    goodput(n) = rows (1 + expected kept tokens when n are asked for) / expected seconds of a step that asks for n

(SmartSpec, Liu et al. 2406.14066; the chain's marginal form is DSpark's scheduler.) Both sides are measured while running:
`survival.py`, `costs.py`, `offers.py`. All rows get the same n: a target pass is as wide as its widest row, so a shorter row
would save nothing; a row close to its end gets what it has room for.

Measuring is part of the price, so it is done where it can change the choice: `probing.py`. A change must promise MARGIN more
than the present choice, except the change to plain decoding.

Lengths follow the clock, so a seeded sampled text repeats only with the drafter-invariant verifier (`gumbel`). Its law is
the target's regardless: what is chosen depends on earlier steps only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from outrider.control.costs import CostCurve
from outrider.control.offers import Offers
from outrider.control.probing import GrowthChecks, PlainChecks, Surprise, Tries
from outrider.rows import Rows
from outrider.survival import ChainSurvival, TreeYield
from outrider.types import Draft, Verdict

MARGIN = 0.02  # predicted gain that a change of length must promise
DOUBT = 2.5  # observations that what is known counts for when drafting is tried again, or surprises
TREE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


class Goodput:
    """See the module docstring. `most`: the largest number of nodes per row. One lives as long as the decoder, so what it
    learns from one request serves the next."""

    def __init__(self, most: int, *, trees: bool) -> None:
        self.most = most
        sizes = [size for size in TREE_SIZES if size < most] if trees else range(1, most)
        self._sizes = [0, *sizes, most]
        self._yield: ChainSurvival | TreeYield = TreeYield() if trees else ChainSurvival()
        self._offers: dict[int, Offers] = {}  # by number of rows
        self._checks, self._tries, self._surprise = PlainChecks(), Tries(), Surprise()
        self._growth = GrowthChecks()
        # What goodput asks for, probes aside. The first steps are paid before anything is known: no long chains.
        self._settled = self._sizes[max(1, (len(self._sizes) + 1) // 2 if trees else len(self._sizes) // 3)]
        self._asked: list[int] = []  # of the present step
        self._chosen: dict[int, Counter[int]] = {}  # number of rows -> size -> steps

    def choose(self, rows: Rows) -> list[int]:
        """Nodes wanted for each row."""
        size = self._next(len(rows))
        self._chosen.setdefault(len(rows), Counter())[size] += 1
        self._asked = [row.wish(size) for row in rows]
        return self._asked

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """A step is over. `seconds`: its time without the prefill of new prompts."""
        drafted, accepted = draft.lists[1], verdict.lists.num_accepted
        offers = self._of(len(rows))
        offers.observe(self._asked, drafted)
        if all(row.stats.steps > 1 for row in rows):  # a row's first step also reads its prompt into the draft
            offers.observe_seconds(self._asked, drafted, seconds)
        for index, asked in enumerate(self._asked):
            if drafted[index]:
                self._learn(index, asked, accepted[index])
        self._checks.observe(self._asked)
        self._tries.observe(drafted, accepted)

    def learn_cost(self, num_rows: int, size: int, seconds: float) -> None:
        """What a step of so many rows that drafts `size` nodes took, measured before there was any traffic."""
        self._of(num_rows).curve.observe(size, seconds)

    def goodput(self, num_rows: int) -> dict[int, float] | None:
        """Size -> predicted tokens per second of steps that ask for that much; None before anything was measured."""
        offers = self._of(num_rows)
        seconds = offers.seconds_of(self._sizes)
        if seconds is None:
            return None
        kept = self._kept_of(num_rows)
        return {size: num_rows * (1 + kept[size]) / time for size, time in zip(self._sizes, seconds, strict=True)}

    def summary(self) -> dict[str, Any]:
        """What was measured and chosen, and by how much the best fixed length is predicted to beat the mix (regret)."""
        total: Counter[int] = sum(self._chosen.values(), Counter())
        report: dict[str, Any] = {"chosen": dict(sorted(total.items())), "by_rows": {}}
        for num_rows, chosen in sorted(self._chosen.items()):
            rates = self.goodput(num_rows)
            if rates:
                best = max(rates, key=lambda size: rates[size])
                report["by_rows"][num_rows] = {
                    "chosen": dict(sorted(chosen.items())), "seconds": self._of(num_rows).curve.known(),
                    "tokens_per_s": rates, "best_fixed": best, "regret": self._regret(num_rows, rates, best),
                }  # fmt: skip
        return report

    def _learn(self, index: int, asked: int, accepted: int) -> None:
        if self._surprise.observe(accepted - self._yield.expected_of([asked])[0]):
            self._yield.doubt(DOUBT)
        self._yield.observe(index, asked, accepted)

    # ---------------------------------------------------------------- choosing

    def _next(self, num_rows: int) -> int:
        rates = self.goodput(num_rows)
        if rates is None:
            return 0 if self._of(num_rows).in_vain else self._settled
        if not self._of(num_rows).is_measured:
            return self._second_size(num_rows)
        best = max(self._sizes, key=lambda size: (rates[size], -size))
        if best == 0 or rates[best] > (1 + MARGIN) * rates[self._settled]:
            self._settled = best
        if self._settled:
            self._tries.rest()
            if self._checks.is_due(rates[self._settled] / rates[0]):
                return 0
            return self._larger() if self._growth.is_due() else self._settled
        first = self._sizes[1]
        price = (1 + self._kept_of(num_rows)[first]) * rates[0] / rates[first] - 1
        if not self._tries.is_due(price):
            return 0
        self._yield.doubt(DOUBT)
        self._of(num_rows).doubt(DOUBT)
        return first

    def _larger(self) -> int:
        return self._sizes[min(self._sizes.index(self._settled) + 1, len(self._sizes) - 1)]

    def _second_size(self, num_rows: int) -> int:
        """Another size than the first, to see what a node costs: the longest where much is kept, else the plain step."""
        known = self._of(num_rows).curve.known()
        if 0 in known:
            return self._settled or self._sizes[1]
        much = self._yield.expected_of([self.most])[0] >= self.most / 2
        return self.most if much and self.most not in known else 0

    def _kept_of(self, num_rows: int) -> dict[int, float]:
        """Size -> expected kept tokens of a row's step that asks for that much."""
        share = self._of(num_rows).share
        return {size: share * kept for size, kept in zip(self._sizes, self._yield.expected_of(self._sizes), strict=True)}

    def _of(self, num_rows: int) -> Offers:
        if num_rows not in self._offers:
            self._offers[num_rows] = self._guess(num_rows)
        return self._offers[num_rows]

    def _guess(self, num_rows: int) -> Offers:
        """A number of rows never seen before costs what lies between its measured neighbours."""
        measured = [rows for rows, offers in self._offers.items() if offers.is_measured]
        lower = max((rows for rows in measured if rows < num_rows), default=None)
        upper = min((rows for rows in measured if rows > num_rows), default=None)
        if lower is None or upper is None:
            return Offers()
        share = (num_rows - lower) / (upper - lower)
        return Offers(CostCurve.between(self._offers[lower].curve, self._offers[upper].curve, share))

    def _regret(self, num_rows: int, rates: dict[int, float], best: int) -> float:
        """1 - (goodput of the mix that was chosen) / (goodput of the best fixed length), both as predicted now."""
        kept, chosen = self._kept_of(num_rows), self._chosen[num_rows]
        tokens = sum(count * (1 + kept[size]) for size, count in chosen.items())
        seconds = sum(count * (1 + kept[size]) / rates[size] for size, count in chosen.items())
        return 1 - tokens / seconds / rates[best]
