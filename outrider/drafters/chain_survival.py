"""Expected kept tokens of one drafter's chains, row by row: what a composite's part is worth.

Only counts of earlier steps enter, never the value of a token that is about to be proposed
(non-anticipation).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from outrider.draft_length.survival import (
    NOTHING,
    PRIOR,
    PRIOR_WEIGHT,
    ByPhase,
    FadingMean,
    Phase,
    Shares,
)

ROW_DECAY = 0.9  # of a row's own record: some 10 steps
CHAIN_LEAN = 3.0  # tokens of the next shallower depth that a depth's record is mixed with
ROW_WEIGHT = 8.0  # tokens of the average that a row's own record is mixed with


@dataclass
class _Average:
    """The shared estimates of all rows in one phase."""

    depths: Shares = field(default_factory=lambda: Shares([PRIOR * PRIOR_WEIGHT], [PRIOR_WEIGHT]))
    all: FadingMean = field(default_factory=lambda: FadingMean(PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT))


@dataclass
class ChainSurvival:
    """Expected kept tokens of one drafter's chains, with a luck for each row: S(i) = c_1 c_2 ...
    c_i.

    `row` is any number that names a row while it lives. Short texts and long ones have averages of
    their own, once `begin_step` says which rows have which.
    """

    _rows: dict[int, FadingMean] = field(default_factory=dict)
    _averages: ByPhase[_Average] = field(default_factory=lambda: ByPhase(_Average))
    _phases: Mapping[int, Phase] = field(default_factory=dict)

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """A step of one row kept `accepted` of a chain of `drafted` tokens."""
        tested = min(accepted + 1, drafted)
        average = self._average(row)
        average.depths.fade()
        average.depths.add(tested, [1.0] * accepted)
        average.all.add(accepted, tested)
        self._rows.setdefault(row, FadingMean()).add(accepted, tested, ROW_DECAY)

    def begin_step(self, phases: Mapping[int, Phase]) -> None:
        """Says which phase the text of each row is in; records of other rows are dropped."""
        self._phases = phases
        self.forget(phases)

    def forget(self, rows: Collection[int]) -> None:
        """Keeps the records of these rows only."""
        self._rows = {row: record for row, record in self._rows.items() if row in rows}

    def curve(self, length: int, row: int | None = None) -> list[float]:
        """S(1) .. S(length) of a row; None: of the average one."""
        scale = 1.0 if row is None else self._luck(row)
        survival = 1.0
        conditional = PRIOR
        weight = NOTHING
        curve = []
        for kept, tried in self._average(row).depths.counts(length):
            conditional = (kept + weight * conditional) / (tried + weight)
            weight = CHAIN_LEAN
            survival *= min(conditional * scale, 1.0)
            curve.append(survival)
        return curve

    def expected(self, num_tokens: int, row: int | None = None) -> float:
        """Kept tokens of a chain of `num_tokens`."""
        return sum(self.curve(num_tokens, row))

    def _luck(self, row: int) -> float:
        """This row's acceptance over everybody's."""
        average = self._average(row).all.mean(PRIOR, NOTHING)
        return (
            self._rows.get(row, FadingMean()).mean(average, ROW_WEIGHT) / average
            if average > 0
            else 1.0
        )

    def _average(self, row: int | None) -> _Average:
        return self._averages.of(Phase() if row is None else self._phases.get(row, Phase()))
