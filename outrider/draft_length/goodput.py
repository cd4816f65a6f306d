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
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from outrider.draft_length.costs import VAIN, CostCurve, Slope, Times
from outrider.draft_length.offers import Offers
from outrider.draft_length.plan import Plans
from outrider.draft_length.probing import TRY_ROWS, Entrance, GrowthChecks, PlainChecks, Surprise, Tries, few
from outrider.draft_length.survival import ChainSurvival, NestedYield, Outcome, TreeYield
from outrider.draft_length.waiting import Step, by_rows, chosen
from outrider.rows import Row, Rows
from outrider.types import Draft, Verdict, VerdictLists

MARGIN = 0.02  # predicted gain that a change of length must promise
SLOPE = 0.05, 0.2  # of a plain step, that a node costs before anything was measured: mean, and deviation for one row
CROWD = 8  # rows up to which the deviation grows, with their root
TOLD, TOLD_ALONE = 3, 10  # times that a median counts for: of a crowd, and of one row, which is timed more often
# Steps are learned from together, and planned together, since to learn and to choose takes half a millisecond, a tenth of a short
# step: as many as last PLAN_S seconds, one for every PLANNED steps since drafting began, MOST_PLANNED at most. Decisions are as
# good as by single steps (benchmarks/control.py).
PLAN_S, PLANNED, MOST_PLANNED = 0.4, 2, 96
WATCHED = 4  # steps after which what was kept is compared with what was expected: together, they take little more than one
DEAR = 0.1  # of a plain step: drafting that adds more has to prove itself whenever it begins again
DOUBT = 2.5  # observations that what is known counts for when drafting is tried again, or surprises
NEARBY = 8  # rows of a crowd of which one more or less changes little: then what such crowds were timed for counts, too
APART = 0.1  # relative deviation of a size's price from one number of rows to another, as large as the share they differ by
LEAST_DOUBT = 1e-6
TREE_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 11, 15, 16, 23, 31, 32, 47, 63, 64)  # a pass over 8, 16, ... tokens is a node less


class Goodput:
    """See the module docstring. `most`: the largest number of nodes per row. One lives as long as the decoder, so what it
    learns from one request serves the next."""

    def __init__(self, most: int, *, trees: bool) -> None:
        self.most = most
        sizes = [size for size in TREE_SIZES if size < most] if trees else range(1, most)
        self._sizes = [0, *sizes, most]
        self._yield: ChainSurvival | TreeYield | NestedYield = TreeYield() if trees else ChainSurvival()
        self._expected = self._expect()
        self._offers: dict[int, Offers] = {}  # by number of rows
        self._checks, self._tries, self._surprise = PlainChecks(), Tries(), Surprise()
        self._growth, self._entrance = GrowthChecks(), Entrance()
        # What goodput asks for, probes aside. The first steps are paid before anything is known: no long chains.
        self._settled = self._sizes[max(1, (len(self._sizes) + 1) // 2 if trees else len(self._sizes) // 3)]
        # Steps so far, when drafting was last weighed against plain decoding, and when it last began, if it is dear.
        self._now = self._weighed_at = self._begun = 0
        self._waiting: list[Step] = []  # not yet learned from
        self._looked_at = 0  # how many of them were compared with what was expected
        self.lessons = 0  # how often steps were learned from
        self._most_waiting = 1
        self._plans = Plans()
        self._asked: list[int] = []  # of the present step
        self._size: int | None = None  # what it was chosen to ask for
        self._reading_s = 0.0  # per token said
        self._unread_s = 0.0  # of all that would have to be read now
        self._pauses: dict[int, Times] = {}  # by number of rows
        self._chosen: dict[int, Counter[int]] = {}  # number of rows -> size -> steps
        self._steps: Counter[int] = Counter()  # by number of rows

    def choose(self, rows: Rows) -> list[int]:
        """Nodes wanted for each row."""
        self._asked = self.ask(rows, len(rows))
        return self._asked

    def ask(self, rows: Iterable[Row], num_rows: int) -> list[int]:
        """The same for these rows of a step that has `num_rows` in all."""
        size = self.next_size(num_rows)
        wanted = [row.wish(size) for row in rows]
        return few(wanted) if self._tries.is_open else wanted

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """A step is over. `seconds`: its time without the prefill of new prompts."""
        timed = all([row.stats.steps > 1 for row in rows])  # a row's first step also reads its prompt into the draft
        self.learn(self._asked, draft.lists[1], verdict.lists, draft.budgets, seconds if timed else None)

    def next_size(self, num_rows: int) -> int:
        """Nodes that the coming step should ask for, for each of so many rows."""
        planned = self._plans.next(num_rows)
        self._size = size = self._plan(num_rows) if planned is None else planned
        return size

    def learn(
        self, asked: Sequence[int], drafted: Sequence[int], verdict: VerdictLists,
        budgets: Sequence[Sequence[int] | None] | None, seconds: float | None, mine: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """What came of a step: nodes asked for and drafted in each of its rows, the verdict, and `Draft.budgets`. `seconds` None:
        its time tells nothing. `mine`: the rows to learn from; None: all."""
        self._waiting.append(Step(self._size, asked, drafted, verdict, budgets, seconds, mine))
        self._size = None
        count = len(self._waiting)
        if count >= self._most_waiting or (count % WATCHED == 0 and self._watch()):
            self._catch_up()

    def learn_cost(self, num_rows: int, size: int, seconds: float) -> None:
        """What a step of so many rows that drafts `size` nodes took, measured before there was any traffic."""
        self._of(num_rows).curve.observe(size, seconds)
        self._plans.drop()

    def learn_costs(self, num_rows: int, seconds: Mapping[int, float]) -> None:
        """The same of several sizes, from another hour: how they compare is known then, how fast the machine is now is not."""
        for size, value in [*seconds.items()] * (TOLD if num_rows > 1 else TOLD_ALONE):
            self.learn_cost(num_rows, size, value)
        self._of(num_rows).curve.unsettle()

    def learn_pause(self, num_rows: int, seconds: float) -> None:
        """What passed between two steps of so many rows: paid once a step, however much it drafts."""
        self._pauses.setdefault(num_rows, Times()).add(seconds)

    def learn_reading(self, seconds_per_token: float) -> None:
        """What the reading of texts costs per token of their answers, where there is drafting: no step's price has it."""
        self._reading_s = seconds_per_token

    def learn_unread(self, seconds: float) -> None:
        """What it would take to read all that has to be read before every row is drafted for."""
        self._unread_s = seconds

    def pays_for(self, num_ready: int, num_asked: int, num_rows: int) -> bool:
        """Whether drafting pays in a step in which only so many of the rows that asked can be drafted for. A try need not."""
        self._catch_up()
        rates = self._blended(num_rows)
        if self._tries.is_open or rates is None or not self._settled:
            return True
        kept = self._kept_of(num_rows)[self._settled]
        return (1 + kept * num_ready / num_asked) / (1 + kept) * rates[self._settled] >= rates[0]

    def goodput(self, num_rows: int) -> dict[int, float] | None:
        """Size -> tokens per second of steps that ask for that much, by what was learned; None before anything was measured."""
        offers = self._of(num_rows)
        seconds = offers.seconds_of(self._sizes)
        if seconds is None:
            return None
        kept, pause = self._kept_of(num_rows), self._pauses[num_rows].mean if num_rows in self._pauses else 0.0
        rates = {}
        for size, time in zip(self._sizes, seconds, strict=True):
            tokens = num_rows * (1 + kept[size])
            rates[size] = tokens / (time + pause + (tokens * self._reading_s if size else 0.0))
        return rates

    @property
    def settled(self) -> int:
        """The length that is believed best, probes aside."""
        return self._settled

    def is_measured(self, num_rows: int) -> bool:
        """Whether there is anything to choose by."""
        return self._of(num_rows).is_measured

    def summary(self) -> dict[str, Any]:
        """What was measured and chosen, and by how much the best fixed length is predicted to beat the mix (regret)."""
        self._catch_up()
        total: Counter[int] = sum(self._chosen.values(), Counter())
        report: dict[str, Any] = {"chosen": dict(sorted(total.items())), "by_rows": {}}
        for num_rows, sizes in sorted(self._chosen.items()):
            rates = self.goodput(num_rows)
            if rates:
                best = max(rates, key=lambda size: rates[size])
                report["by_rows"][num_rows] = {
                    "chosen": dict(sorted(sizes.items())), "seconds": self._of(num_rows).curve.known(),
                    "tokens_per_s": rates, "best_fixed": best, "regret": self._regret(num_rows, rates, best),
                }  # fmt: skip
        return report

    def _watch(self) -> bool:
        """Whether waiting steps not looked at yet show that the text has changed; what is known is doubted then."""
        steps, self._looked_at = self._waiting[self._looked_at :], len(self._waiting)
        surprised = any([self._surprise.observe(step.error(self._expected)) for step in steps])
        if surprised:
            self._doubt(DOUBT)
        return surprised

    def _catch_up(self) -> None:
        """Learn from the steps that wait."""
        if not self._waiting:
            return
        self._watch()
        waiting, self._waiting, self._looked_at = self._waiting, [], 0
        self._now += len(waiting)
        self.lessons += 1
        for num_rows, steps in by_rows(waiting).items():
            offers, sizes = self._of(num_rows), chosen(steps)
            if sizes:
                self._chosen.setdefault(num_rows, Counter()).update(sizes)
                self._steps[num_rows] += sizes.total()
            offers.observe([step.counts() for step in steps])
            self._learn_seconds(offers, steps)
        outcomes = [found for step in waiting if (found := step.outcomes())]
        if outcomes:
            self._learn_kept(outcomes)
        if self._tries.is_open:
            self._tries.observe(sum(one.accepted for one in outcomes[-1]) if outcomes else None)

    def _learn_seconds(self, offers: Offers, steps: Sequence[Step]) -> None:
        """Waiting steps of one kind are one time, which counts for as many as they are."""
        alike: dict[int, list[float]] = {}
        for step in steps:
            if step.seconds is not None:
                drafted = max(step.drafted)
                alike.setdefault(drafted if drafted or not any(step.asked) else VAIN, []).append(step.seconds)
        for size, seconds in alike.items():
            offers.observe_seconds(size, median(seconds), self._now, len(seconds))

    def _learn_kept(self, steps: Sequence[list[Outcome]]) -> None:
        """What was kept, step by step."""
        tally = Counter([outcome for step in steps for outcome in step])
        if isinstance(self._yield, TreeYield) and any(outcome.budgets is not None for outcome in tally):
            self._yield = NestedYield()
        self._yield.observe_all(tally, len(steps))
        self._expected = self._expect()
        if not self._settled:  # a try
            self._plans.drop()

    # ---------------------------------------------------------------- choosing

    def _plan(self, num_rows: int) -> int:
        """What the coming step asks for; those after it are planned, too, where nothing will be learned before them."""
        self._catch_up()
        rates = self._blended(num_rows)
        offers = self._of(num_rows)
        if rates is None:
            return 0 if offers.in_vain else self._settled
        if not offers.is_measured:
            return self._second_size(num_rows)
        best = max(self._sizes, key=lambda size: (rates[size], -size))
        if self._changes(rates, best, num_rows):
            if not self._settled and self._price(rates, best, num_rows) > DEAR:
                self._begun = self._now
            self._settled = best
            self._growth.restart()
            self._plans.drop()
        sizes = self._drafting_steps(rates, num_rows) if self._settled else self._plain_steps(rates, num_rows)
        self._plans.make(num_rows, sizes[1:])
        self._most_waiting = 1 if self._tries.is_open else self._pace(num_rows)
        return sizes[0]

    def _drafting_steps(self, rates: Mapping[int, float], num_rows: int) -> list[int]:
        """What they ask for while drafting pays."""
        sizes = [self._settled] * self._pace(num_rows)
        self._tries.rest(len(sizes))
        if (place := self._growth.due(len(sizes))) is not None:
            sizes[place] = self._larger()
        if (place := self._checks.due(len(sizes), rates[self._settled] / rates[0])) is not None:
            sizes[place] = 0
        return sizes

    def _plain_steps(self, rates: Mapping[int, float], num_rows: int) -> list[int]:
        """What they ask for while it does not: nothing, up to the next step of a try, which begins a plan."""
        self._checks.restart()
        first = self._sizes[1]
        if self._tries.is_due(self._price(rates, first, num_rows)):
            self._doubt(DOUBT * min(num_rows, TRY_ROWS))
            self._of(num_rows).doubt(DOUBT)
            return [first]
        return [0] * self._tries.wait(self._pace(num_rows))

    def _changes(self, rates: Mapping[int, float], best: int, num_rows: int) -> bool:
        """Whether another length than the present one is to be settled on."""
        if best == self._settled or (best and rates[best] <= (1 + MARGIN) * rates[self._settled]):
            self._entrance.close()
            return False
        if self._settled:
            return True
        steps, self._weighed_at = self._now - self._weighed_at, self._now
        if not self._entrance.opens(rates[best] / rates[0] - 1, self._unread_s * rates[0] / num_rows, steps):
            return False
        self._entrance.close()
        return True

    def _price(self, rates: Mapping[int, float], size: int, num_rows: int) -> float:
        """What asking for `size` adds to the seconds of a plain step, in shares."""
        return (1 + self._kept_of(num_rows)[size]) * rates[0] / rates[size] - 1

    def _pace(self, num_rows: int) -> int:
        """After how many steps of so many rows they are looked at anew: see PLAN_S."""
        step_s = self._of(num_rows).step_s
        seen = min(self._steps[num_rows], self._now - self._begun)
        return max(1, min(1 + seen // PLANNED, MOST_PLANNED, int(PLAN_S / step_s))) if step_s else 1

    def _blended(self, num_rows: int) -> dict[int, float] | None:
        """`goodput`, but what a crowd's sizes gain over its plain step is taken from crowds of nearly as many rows as well, each
        as far as it is known there: the number of rows changes from step to step, and each has few times of its own."""
        rates = self.goodput(num_rows)
        if rates is None:
            return None
        reach = num_rows // NEARBY
        near = [rows for rows, offers in self._offers.items() if abs(rows - num_rows) <= reach and offers.is_measured]
        if len(near) < 2:
            return rates
        gains, weights = np.zeros(len(self._sizes)), np.zeros(len(self._sizes))
        for rows in near:
            others = self.goodput(rows)
            assert others is not None
            apart = APART * abs(rows - num_rows) / num_rows
            weight = 1 / (np.array(self._of(rows).curve.doubts_of(self._sizes)) + apart**2 + LEAST_DOUBT)
            gains += weight * np.log([others[size] / others[0] for size in self._sizes])
            weights += weight
        return dict(zip(self._sizes, (rates[0] * np.exp(gains / weights)).tolist(), strict=True))

    def _larger(self) -> int:
        return self._sizes[min(self._sizes.index(self._settled) + 1, len(self._sizes) - 1)]

    def _second_size(self, num_rows: int) -> int:
        """Another size than the first, to see what a node costs: the longest where much is kept, else the plain step."""
        known = self._of(num_rows).curve.known()
        if 0 in known:
            return self._settled or self._sizes[1]
        much = self._expected[self.most] >= self.most / 2
        return self.most if much and self.most not in known else 0

    def _kept_of(self, num_rows: int) -> dict[int, float]:
        """Size -> expected kept tokens of a row's step that asks for that much."""
        share = self._of(num_rows).share
        return {size: share * kept for size, kept in self._expected.items()}

    def _expect(self) -> dict[int, float]:
        """Size -> expected kept tokens of a row that is offered what it asks for."""
        return dict(zip(self._sizes, self._yield.expected_of(self._sizes), strict=True))

    def _doubt(self, most: float) -> None:
        """What is known of kept tokens counts for `most` observations at most: news is to be believed soon."""
        self._yield.doubt(most)
        self._expected = self._expect()
        self._plans.drop()

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
            mean, deviation = SLOPE
            return Offers(CostCurve(self.most, Slope(mean, deviation * min(num_rows, CROWD) ** 0.5)))
        share = (num_rows - lower) / (upper - lower)
        return Offers(CostCurve.between(self._offers[lower].curve, self._offers[upper].curve, share))

    def _regret(self, num_rows: int, rates: dict[int, float], best: int) -> float:
        """1 - (goodput of the mix that was chosen) / (goodput of the best fixed length), both as predicted now."""
        kept, chosen = self._kept_of(num_rows), self._chosen[num_rows]
        tokens = sum(count * (1 + kept[size]) for size, count in chosen.items())
        seconds = sum(count * (1 + kept[size]) / rates[size] for size, count in chosen.items())
        return 1 - tokens / seconds / rates[best]
