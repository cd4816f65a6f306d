"""How many nodes bring the most tokens per second with one drafter, none included.

    goodput(n) = rows (1 + expected kept nodes when n are asked for) / expected seconds of a step
    that asks for n

(SmartSpec, Liu et al. 2406.14066.) Both sides are measured while running: `survival.py`,
`costs.py`. All rows get the same n, since a target pass is as wide as its widest row. Thoughts and
answers, short texts and long ones are easy or hard to guess each in their own way, so what is kept
of drafts is measured for each `Phase`; a step's estimate is their mean by its rows.

Steps are planned: 1, then 2, 4, ... up to MAX_PLAN of one length, fewer again after a change.
Learning and deciding between them takes half a millisecond each time, a tenth of a short step. Now
and then a plan ends with a probe: of a larger length, of a plain step where drafting pays little,
of one node in a few rows where it does not pay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from outrider.draft_length.costs import EMPTY_DRAFT, LengthCosts
from outrider.draft_length.survival import ByPhase, KeptNodes, Phase
from outrider.types import VerdictLists

MAX_PLAN = 16
# steps from a change to a probe; each probe that changes nothing doubles the time to the next one
MIN_GAP = 4
PROBE_SHARE = 0.003  # of the time, that probes may cost in the long run: cheap ones stay frequent
CLOSE = 1.5  # times a plain step's goodput, below which plain steps are probed, too
FILE_COUNT = 10  # times that a median from a file counts for


class ObservedStep(NamedTuple):
    """A step as it was seen: nothing is computed before it is learned from."""

    num_rows: int
    size: int | None  # chosen for this drafter's rows; None: each of them had a number of its own
    asked: Sequence[int]  # nodes, per row
    drafted: Sequence[int]  # the same
    verdict: VerdictLists
    budgets: Sequence[Sequence[int] | None] | None  # `Draft.budgets`
    seconds: float | None  # None: its time tells nothing
    rows: Sequence[int]  # that this drafter drafts for
    phases: Sequence[Phase]  # that each row of the step was in
    context: int  # tokens of all its rows' texts
    experts: float | None = None  # distinct ones that its pass read; None: not known

    def kept_budgets(self, row: int) -> list[int] | None:
        """How much must be asked for to get each of the row's kept nodes; None: the drafter does
        not say."""
        known = None if self.budgets is None else self.budgets[row]
        path = self.verdict.path[row]
        accepted = self.verdict.num_accepted[row]
        return None if known is None else [known[node] for node in path[:accepted]]


@dataclass
class Crowd:
    """The measurements of steps with one number of rows, and the next length to try."""

    costs: LengthCosts
    settled: int  # the length believed best
    plan: list[int] = field(default_factory=list)  # sizes of the coming steps, the next one last
    planned: int = 0  # steps of the latest plan
    pace: int = 1  # steps of the next one
    gap: int = MIN_GAP  # steps between the latest probe and the next one
    due: int = MIN_GAP  # steps until the next probe
    context: int = 0  # tokens of the texts in the latest step
    prices: list[float] = field(default_factory=list)  # see `Goodput.prices`
    missed: float = 0.0  # plain steps' worth of gain that was let go by
    chosen: Counter[int] = field(default_factory=Counter)


class Goodput:
    """Chooses lengths up to `max_nodes`. One lives as long as the decoder, so what it learns from
    one request serves the next."""

    def __init__(self, max_nodes: int, *, trees: bool) -> None:
        self.max_nodes = max_nodes
        self._trees = trees
        self._kept = ByPhase(KeptNodes)
        self._shares: Mapping[Phase, float] = {Phase(): 1.0}  # of the present step's rows
        self._expected = self._expect()
        self._crowds: dict[int, Crowd] = {}  # by number of rows
        self._waiting: list[ObservedStep] = []  # not learned from yet
        self._now = 0  # steps learned from
        self.lessons = 0  # how often
        self.reading_s = 0.0  # per emitted token, for reading texts, where there are drafts
        self.unread_s = 0.0  # for reading all that must be read before every row can be drafted for

    def next_size(self, num_rows: int, shares: Mapping[Phase, float], context: int) -> int:
        """Nodes that the coming step asks for, for each of the rows, whose texts have `context`
        tokens in all. `shares`: of this drafter's rows, by their phase."""
        crowd = self._crowd(num_rows)
        crowd.context = context
        if shares != self._shares:  # what was planned was for other rows
            self._learn()
            self._shares = shares
            self._expected = self._expect()
            for each in self._crowds.values():
                each.due, each.planned, each.plan = (
                    each.due + len(each.plan),
                    each.planned - len(each.plan),
                    [],
                )
        if not crowd.plan:
            self._decide(crowd, num_rows)
        return crowd.plan.pop()

    def learn(self, step: ObservedStep) -> None:
        """A step is over."""
        self._waiting.append(step)

    def learn_costs(
        self,
        num_rows: int,
        seconds: Mapping[int, float],
        experts: Mapping[int, float] | None = None,
    ) -> None:
        """Step times, and distinct experts where they are known, by nodes drafted, from another
        hour."""
        costs = self._crowd(num_rows).costs
        for size, value in seconds.items():
            costs.observe(size, value, count=FILE_COUNT, experts=(experts or {}).get(size))
        costs.unsettle()

    def settled(self, num_rows: int) -> int:
        """The length believed best, probes aside."""
        return self._crowd(num_rows).settled

    def goodput(self, num_rows: int) -> list[float] | None:
        """Tokens per second of steps that ask for 0, 1, ... `max_nodes`; None before anything was
        timed."""
        crowd = self._crowd(num_rows)
        if not crowd.costs.times:
            return None
        tokens = [num_rows * (1 + expected) for expected in self._expected]
        reading = [0.0, *(count * self.reading_s for count in tokens[1:])]
        steps = crowd.costs.asked(crowd.context)
        return [
            count / (step + more) for count, step, more in zip(tokens, steps, reading, strict=True)
        ]

    def prices(self, num_rows: int) -> list[float]:
        """The tokens that nodes must bring, by how many a pass verifies (`trees/paying.py`), where the target is
        a mixture; else none. Of the latest plan."""
        return self._crowd(num_rows).prices

    def _prices(self, crowd: Crowd, rates: Sequence[float] | None) -> list[float]:
        if rates is None or not crowd.costs.expected_experts():
            return []
        *seconds, empty = crowd.costs.drafted(crowd.context)
        return [0.0, *(max(rates) * max(each - empty, 0.0) for each in seconds[1:])]

    def pays_for(self, num_ready: int, num_asked: int, num_rows: int) -> bool:
        """Whether drafting pays in a step in which only this many of the rows that asked can be
        drafted for. A probe need not."""
        rates = self.goodput(num_rows)
        size = self.settled(num_rows)
        if rates is None or not size:
            return True
        expected = self._expected[size]
        return (1 + expected * num_ready / num_asked) / (1 + expected) * rates[size] >= rates[0]

    def summary(self) -> dict[str, Any]:
        """The measured costs and chosen lengths, and by how much the best fixed length is predicted
        to beat the mix (regret)."""
        self._learn()
        total: Counter[int] = sum((crowd.chosen for crowd in self._crowds.values()), Counter())
        known = [
            rows
            for rows, crowd in sorted(self._crowds.items())
            if crowd.chosen and crowd.costs.times
        ]
        by_rows = {rows: self._report(rows, self._crowds[rows]) for rows in known}
        return {"chosen": dict(sorted(total.items())), "by_rows": by_rows}

    def _report(self, num_rows: int, crowd: Crowd) -> dict[str, Any]:
        rates = self.goodput(num_rows)
        seconds = crowd.costs.drafted(crowd.context)
        assert rates is not None, "something was timed"
        tokens = {size: count * (1 + self._expected[size]) for size, count in crowd.chosen.items()}
        spent = sum(count / rates[size] for size, count in tokens.items())
        best = rates.index(max(rates))
        return {
            "chosen": dict(sorted(crowd.chosen.items())),
            "seconds": {
                size: seconds[size] for size in sorted(crowd.costs.times) if size != EMPTY_DRAFT
            },
            "tokens_per_s": dict(enumerate(rates)),
            "experts": crowd.costs.expected_experts(),
            "best_fixed": best,
            "regret": 1 - sum(tokens.values()) / spent / rates[best],
        }

    # ---------------------------------------------------------------- learning

    def _learn(self) -> None:
        """Take in the steps that wait."""
        steps = self._waiting
        self._waiting = []
        if not steps:
            return
        self.lessons = self.lessons + 1
        self._now = self._now + len(steps)
        for num_rows in {step.num_rows for step in steps}:
            self._learn_costs(
                self._crowd(num_rows), [step for step in steps if step.num_rows == num_rows]
            )
        present = Counter(
            phase for step in steps for phase in {step.phases[row] for row in step.rows}
        )
        for phase, count in present.items():
            self._kept.of(phase).fade(count)
        for step in steps:
            for row in step.rows:
                if step.asked[row]:
                    accepted = step.verdict.num_accepted[row]
                    budgets = step.kept_budgets(row) if self._trees else range(1, accepted + 1)
                    self._kept.of(step.phases[row]).observe(step.asked[row], accepted, budgets)
        self._expected = self._expect()

    def _expect(self) -> list[float]:
        """Kept nodes by nodes asked for: the mean of the present step's rows."""
        each = [
            (share, self._kept.of(phase).expected(self.max_nodes))
            for phase, share in self._shares.items()
        ]
        return [
            sum(share * curve[size] for share, curve in each) for size in range(self.max_nodes + 1)
        ]

    def _learn_costs(self, crowd: Crowd, steps: Sequence[ObservedStep]) -> None:
        """Steps that drafted alike are one time, their median, that counts for as many."""
        crowd.chosen.update(step.size for step in steps if step.size is not None)
        asking = [
            ([step.asked[row] for row in step.rows], [step.drafted[row] for row in step.rows])
            for step in steps
        ]
        crowd.costs.observe_offers(
            [(max(asked), max(drafted)) for asked, drafted in asking if any(asked)]
        )
        alike: dict[int, list[ObservedStep]] = {}
        for step in steps:
            if step.seconds is not None:
                size = max(step.drafted)
                alike.setdefault(size if size or not any(step.asked) else EMPTY_DRAFT, []).append(
                    step
                )
        for size, same in alike.items():
            crowd.costs.observe(
                size,
                median(step.seconds for step in same if step.seconds is not None),
                self._now,
                len(same),
                fmean(step.context for step in same),
                fmean(step.experts or 0.0 for step in same),
            )

    # ---------------------------------------------------------------- deciding

    def _decide(self, crowd: Crowd, num_rows: int) -> None:
        """Settle on a length and plan the coming steps."""
        self._learn()
        rates = self.goodput(num_rows)
        best = crowd.settled if rates is None else rates.index(max(rates))
        if rates is None or not best or crowd.settled:
            crowd.missed = 0.0
        else:  # drafting would begin: when the gain let go by so far would have paid for the reading
            crowd.missed += (rates[best] / rates[0] - 1) * crowd.planned
            if crowd.missed < self.unread_s * rates[0] / num_rows:
                best = 0
        crowd.prices = self._prices(crowd, rates)
        if best != crowd.settled:
            few = max(1, crowd.pace // 4) if crowd.settled else 1
            crowd.pace = few if best else MIN_GAP
        crowd.settled = best
        crowd.plan = [best] * crowd.pace
        crowd.due -= crowd.pace
        if crowd.due <= 0:
            crowd.plan[0] = probe = self._probe(crowd, rates)
            loss = 0.0 if rates is None else 1 - rates[probe] / rates[best]
            crowd.due = crowd.gap = max(MIN_GAP, min(2 * crowd.gap, int(loss / PROBE_SHARE)))
        crowd.planned, crowd.pace = crowd.pace, min(2 * crowd.pace, MAX_PLAN)

    def _probe(self, crowd: Crowd, rates: Sequence[float] | None) -> int:
        """A larger length; or a plain step, where it was timed less and may be nearly as good."""
        larger = min(crowd.settled + max(1, crowd.settled // 4), self.max_nodes)
        times = crowd.costs.times
        is_close = rates is None or rates[crowd.settled] < CLOSE * rates[0]
        return 0 if not times[0] or (is_close and times[0] < times[larger]) else larger

    def _crowd(self, num_rows: int) -> Crowd:
        """Crowds that differ little are one. One that was never timed compares sizes as the nearest
        one does."""
        near = num_rows - num_rows % (1 << max(0, num_rows.bit_length() - 4))
        crowd = self._crowds.get(near)
        if crowd is None:  # making one takes longer than a step's other arithmetic
            crowd = self._crowds[near] = Crowd(
                LengthCosts(self.max_nodes), settled=max(1, self.max_nodes // 3)
            )
        if not crowd.costs.times:
            timed = [rows for rows, other in self._crowds.items() if other.costs.times]
            nearest = min(timed, key=lambda rows: abs(rows - near), default=None)
            if nearest is not None:
                crowd.costs = self._crowds[nearest].costs.copy()
        return crowd
