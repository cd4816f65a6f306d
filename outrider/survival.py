"""How many of n draft nodes will be kept: calibrated online from verdicts alone, so every drafter shares it.

A chain is a survival curve: S(i) = P(at least i tokens kept | at least i were drafted) = c_1 c_2 ... c_i. The conditional
acceptances c_i are kept as decaying counts over all rows, deep ones leaning on shallower ones while they are rare; a row
that is luckier or unluckier than the others scales them. A tree has no single next token per depth; there the mean number
of kept nodes is kept per size and interpolated in log(size).

Only counts of earlier steps enter, never the value of a token that is about to be proposed (non-anticipation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

DECAY = 0.98  # per observation at that depth: a memory of some 50 steps
ROW_DECAY = 0.9  # of a row's own record: some 10 steps
PRIOR, PRIOR_WEIGHT = 0.7, 2.0  # conditional acceptance before anything was seen, and how many tokens that counts for
ROW_WEIGHT = 8.0  # tokens of the average that a row's own record is mixed with


@dataclass
class _Record:
    kept: float = 0.0
    tried: float = 0.0

    def add(self, kept: float, tried: float, decay: float) -> None:
        self.kept = decay * self.kept + kept
        self.tried = decay * self.tried + tried


@dataclass
class ChainSurvival:
    """Expected kept tokens of a chain."""

    _depths: list[_Record] = field(default_factory=list)
    _rows: dict[int, _Record] = field(default_factory=dict)
    _all: _Record = field(default_factory=_Record)

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """One step of one row: `accepted` of a chain of `drafted` tokens were kept."""
        tested = min(accepted + 1, drafted)
        while len(self._depths) < tested:
            self._depths.append(_Record())
        for depth in range(tested):
            self._depths[depth].add(float(depth < accepted), 1.0, DECAY)
        self._all.add(accepted, tested, DECAY)
        self._rows.setdefault(row, _Record()).add(accepted, tested, ROW_DECAY)

    def forget(self, rows: set[int]) -> None:
        """Keep the records of these rows only."""
        self._rows = {row: record for row, record in self._rows.items() if row in rows}

    def curve(self, length: int, row: int | None = None) -> list[float]:
        """S(1) .. S(length); of one row, or of the average one."""
        scale = 1.0 if row is None else self._luck(row)
        survival, before, curve = 1.0, PRIOR, []
        for depth in range(length):
            record = self._depths[depth] if depth < len(self._depths) else _Record()
            before = (record.kept + PRIOR_WEIGHT * before) / (record.tried + PRIOR_WEIGHT)
            survival *= min(before * scale, 1.0)
            curve.append(survival)
        return curve

    def expected(self, num_nodes: int, row: int | None = None) -> float:
        return sum(self.curve(num_nodes, row))

    def _luck(self, row: int) -> float:
        """This row's acceptance over everybody's, its own record counting by its size."""
        if self._all.tried == 0 or row not in self._rows:
            return 1.0
        average = (self._all.kept + PRIOR_WEIGHT * PRIOR) / (self._all.tried + PRIOR_WEIGHT)
        record = self._rows[row]
        own = (record.kept + ROW_WEIGHT * average) / (record.tried + ROW_WEIGHT)
        return own / average if average > 0 else 1.0


@dataclass
class TreeYield:
    """Expected kept tokens of a tree of n nodes."""

    _sizes: dict[int, _Record] = field(default_factory=dict)

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        self._sizes.setdefault(drafted, _Record()).add(accepted, 1.0, DECAY)

    def forget(self, rows: set[int]) -> None:
        """Nothing is kept per row."""

    def expected(self, num_nodes: int, row: int | None = None) -> float:
        """Interpolated between the sizes that were seen; beyond them and before any, by a prior that grows like log n."""
        if num_nodes == 0:
            return 0.0
        means = {size: record.kept / record.tried for size, record in self._sizes.items() if record.tried >= 1}
        below = max((size for size in means if size <= num_nodes), default=None)
        above = min((size for size in means if size >= num_nodes), default=None)
        if below is None and above is None:
            return PRIOR * math.log2(num_nodes + 1)
        if below is None or above is None:
            known = below if above is None else above
            assert known is not None
            return means[known] * math.log2(num_nodes + 1) / math.log2(known + 1)
        if below == above:
            return means[below]
        share = (math.log(num_nodes) - math.log(below)) / (math.log(above) - math.log(below))
        return means[below] + share * (means[above] - means[below])
