"""What asking for n nodes really costs, where drafters offer less than asked: look-ups find nothing, stop rules stop early.

With W the widest row's nodes (0: nothing was offered) and c the cost curve by nodes drafted,

    E[seconds | n asked] = c(0) + sum over i = 1..n of P(W >= i) (c(i) - c(i - 1)),    c(0): asked in vain

That c(0) is measured apart from a plain step: a draft model that stops before its first token has run a pass all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.control.costs import CostCurve, Times
from outrider.survival import DECAY, Record

PRIOR_WEIGHT = 0.2  # steps that "what is asked for is offered" counts for
IN_VAIN = 3  # steps without any offer after which a plain step is timed beside them


@dataclass
class Offers:
    """Of one number of rows. Before anything is seen, what is asked for is offered."""

    curve: CostCurve = field(default_factory=CostCurve)
    empty: Times = field(default_factory=Times)  # steps that asked and got nothing
    _reached: list[Record] = field(default_factory=list)  # [i]: W > i, where more than i were asked for
    _rows: Record = field(default_factory=Record)  # rows that were offered something, of those that asked

    def observe(self, asked: Sequence[int], drafted: Sequence[int]) -> None:
        """One step: nodes asked for and nodes drafted, per row."""
        most, width = max(asked), max(drafted)
        if not most:
            return
        while len(self._reached) < most:
            self._reached.append(Record())
        for size, record in enumerate(self._reached):
            record.add(float(width > size), 1.0) if size < most else record.scale(DECAY)
        self._rows.add(sum(map(bool, drafted)), sum(map(bool, asked)))

    def observe_seconds(self, asked: Sequence[int], drafted: Sequence[int], seconds: float) -> None:
        """The time of a step, where it tells something."""
        if max(asked) and not max(drafted):
            self.empty.add(seconds)
        else:
            self.curve.observe(max(drafted), seconds)

    def doubt(self, most: float) -> None:
        """What is known of offers counts for `most` steps at most: news is to be believed soon."""
        for record in (*self._reached, self._rows):
            record.limit(most)

    @property
    def is_measured(self) -> bool:
        """Whether there is something to compare: two sizes, or a plain step and that nothing is ever offered."""
        known = self.curve.known()
        return len(known) >= 2 or (0 in known and bool(self.empty.latest))

    @property
    def in_vain(self) -> bool:
        """Whether several steps have asked and nothing else is known yet."""
        return len(self.empty.latest) >= IN_VAIN and not self.curve.known()

    @property
    def share(self) -> float:
        """How many of the rows that ask are offered something."""
        return self._rows.mean(1.0, PRIOR_WEIGHT)

    def seconds_of(self, sizes: Sequence[int]) -> list[float] | None:
        """Expected seconds of a step that asks for that many nodes; None before anything was measured."""
        plain = self.curve.seconds(0)
        if plain is None:
            return None
        nothing = self.empty.mean if self.empty.latest else plain
        costs, before, reached, total = [plain], nothing, 1.0, nothing
        for size in range(1, max(sizes) + 1):
            record = self._reached[size - 1] if size <= len(self._reached) else Record()
            reached = min(record.mean(reached, PRIOR_WEIGHT), reached)
            cost = self.curve.seconds(size) or plain
            total += reached * (cost - before)
            costs.append(total)
            before = cost
        return [costs[size] for size in sizes]
