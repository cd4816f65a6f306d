"""What asking for n nodes really costs, where drafters offer less than asked: look-ups find nothing, stop rules stop early.

With W the widest row's nodes (0: nothing was offered) and c the cost curve by nodes drafted,

    E[seconds | n asked] = c(0) + sum over i = 1..n of P(W >= i) (c(i) - c(i - 1)),    c(0): asked in vain

That c(0) is measured apart from a plain step (`costs.VAIN`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.draft_length.costs import VAIN, CostCurve
from outrider.draft_length.survival import DECAY, Record, Shares

PRIOR_WEIGHT = 0.2  # steps that "what is asked for is offered" counts for
IN_VAIN = 3  # steps without any offer after which a plain step is timed beside them


@dataclass
class Offers:
    """Of one number of rows. Before anything is seen, what is asked for is offered."""

    curve: CostCurve = field(default_factory=CostCurve)
    step_s: float = 0.0  # of the latest step or steps; 0: none was timed
    _reached: Shares = field(default_factory=Shares)  # place i: steps with W > i, of those that asked for more than i
    _timed: int = 0  # number of the step that was timed last
    _rows: Record = field(default_factory=Record)  # rows that were offered something, of those that asked

    def observe(self, steps: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Of every step nodes asked for and nodes drafted, per row. All count as if they came last."""
        most_and_width: Counter[tuple[int, int]] = Counter()
        asking = offered = 0
        for asked, drafted in steps:
            most_and_width[max(asked), max(drafted)] += 1
            asking += sum(map(bool, asked))
            offered += sum(map(bool, drafted))
        num_steps = sum(count for (most, _), count in most_and_width.items() if most)
        self._reached.fade(num_steps)
        for (most, width), count in most_and_width.items():
            self._reached.add(most, range(min(width, most)), count)
        self._rows.add(offered, asking, DECAY**num_steps)

    def observe_seconds(self, size: int, seconds: float, now: int, count: int = 1) -> None:
        """The time of a step that drafted `size` nodes, or VAIN, or the median of `count` like it. `now`: number of the latest
        step, of any rows. Between sizes that are learned at once the machine stays as it was."""
        age, self._timed, self.step_s = now - self._timed, now, seconds
        self.curve.observe(size, seconds, age, count)

    def doubt(self, most: float) -> None:
        """What is known of offers counts for `most` steps at most: news is to be believed soon."""
        self._reached.limit(most)
        self._rows.limit(most)

    @property
    def is_measured(self) -> bool:
        """Whether there is something to compare: two sizes, or a plain step and that nothing is ever offered."""
        return self.curve.num_known >= 2 or (self.curve.num_known == 1 and self.curve.count(0) > 0 < self.curve.count(VAIN))

    @property
    def in_vain(self) -> bool:
        """Whether several steps have asked and nothing else is known yet."""
        return self.curve.count(VAIN) >= IN_VAIN and not self.curve.num_known

    @property
    def share(self) -> float:
        """How many of the rows that ask are offered something."""
        return self._rows.mean(1.0, PRIOR_WEIGHT)

    def seconds_of(self, sizes: Sequence[int]) -> list[float] | None:
        """Expected seconds of a step that asks for that many nodes; None before anything was measured."""
        if not self.curve.num_known:
            return None
        plain, nothing, *drafting = self.curve.seconds_of([0, VAIN, *range(1, max(sizes) + 1)])
        costs, before, reached, total = [plain], nothing, 1.0, nothing
        for cost, (wide, asked) in zip(drafting, self._reached.counts(len(drafting)), strict=True):
            reached = min((wide + PRIOR_WEIGHT * reached) / (asked + PRIOR_WEIGHT), reached)
            total += reached * (cost - before)
            costs.append(total)
            before = cost
        return [costs[size] for size in sizes]
