"""How many of n draft nodes will be kept: calibrated online from verdicts alone, so every drafter shares it.

A chain is a survival curve: S(i) = P(at least i tokens kept | at least i were drafted) = c_1 c_2 ... c_i. The conditional
acceptances c_i are fading counts over all rows, deep ones leaning on shallower ones while they are rare; a row that is
luckier or unluckier than the others scales them. A tree has no single next token per depth. Where a drafter says which node
one more would have been (`Draft.budgets`), each node's share of being kept is counted instead, as a chain's token's. Where it
does not, the mean number of kept nodes is known per size, and sizes lean on the best curve of the family s log2(1 + n)^b.

Everything fades with every step, also what is not seen at present: a depth or size given up long ago gets another chance.
Only counts of earlier steps enter, never the value of a token that is about to be proposed (non-anticipation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

DECAY = 0.98  # per step, however many rows it has: a memory of some 50 steps
ROW_DECAY = 0.9  # of a row's own record: some 10 steps
PRIOR, PRIOR_WEIGHT = 0.7, 2.0  # conditional acceptance before anything was seen; how many tokens it counts for, fading too
LEAN_WEIGHT = 3.0  # tokens of the next shallower depth that a depth's own record is mixed with
LEAST_SHARE = 0.1  # of steps, that a node counts as kept in where the next one leans on it: else it would hardly be believed
HEAVY = 1e9  # weight of an observation, above which all are scaled down
ALMOST_NOTHING = 1e-6  # weight of the prior once it has faded
ROW_WEIGHT = 8.0  # tokens of the average that a row's own record is mixed with
BENDS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)  # b of the family; 0: more nodes bring nothing more
BEND_DEVIATION = 0.7  # of b from 1, before anything was seen: rarely large
STEEPNESS = 0.15, 0.3  # deviation of b from what trees that ran out say: relative, and of one tree
LEAST_VARIANCE = 0.05
FIT_EVERY = 4  # outcomes
FIT_WEIGHT = 15.0  # observations that the fitted curve counts for at each size


class Outcome(NamedTuple):
    """What came of one row in one step."""

    asked: int  # nodes
    accepted: int  # of them
    ran_out: bool = False  # the last one kept had no children: more might have been kept
    budgets: tuple[int, ...] | None = None  # of every kept node, how much must be asked for to get it; None: unknown


@dataclass
class Record:
    """A fading mean: `kept` of `tried`."""

    kept: float = 0.0
    tried: float = 0.0

    def add(self, kept: float, tried: float, decay: float = DECAY) -> None:
        self.scale(decay)
        self.kept += kept
        self.tried += tried

    def scale(self, factor: float) -> None:
        self.kept *= factor
        self.tried *= factor

    def limit(self, most: float) -> None:
        """Let it count for `most` tries at most, the mean unchanged."""
        if self.tried > most:
            self.scale(most / self.tried)

    def mean(self, prior: float, weight: float) -> float:
        """`prior` counts for `weight` tries."""
        return (self.kept + weight * prior) / (self.tried + weight)


@dataclass
class Shares:
    """Counts of tries and of kept tokens at each position, from 0, that fade. To fade touches no place: what comes later
    weighs more instead."""

    _kept: list[float] = field(default_factory=list)
    _tried: list[float] = field(default_factory=list)
    _weight: float = 1.0  # of one observation now

    def fade(self, steps: int = 1) -> None:
        """So many steps have passed."""
        self._weight /= DECAY**steps
        if self._weight > HEAVY:
            self._kept = [value / self._weight for value in self._kept]
            self._tried = [value / self._weight for value in self._tried]
            self._weight = 1.0

    def add(self, tried: int, kept: Iterable[int], count: int = 1) -> None:
        """So many places, from the first on, were tried, and these of them kept; `count` times."""
        weight = count * self._weight
        while len(self._tried) < tried:
            self._kept.append(0.0)
            self._tried.append(0.0)
        for place in range(tried):
            self._tried[place] += weight
        for place in kept:
            self._kept[place] += weight

    def limit(self, most: float) -> None:
        """Let each place count for `most` tries at most, its share unchanged."""
        heavy = most * self._weight
        for place, tried in enumerate(self._tried):
            if tried > heavy:
                self._kept[place] *= heavy / tried
                self._tried[place] = heavy

    def counts(self, length: int) -> list[tuple[float, float]]:
        """How often each of the first `length` positions was kept, and tried."""
        unseen = [0.0] * (length - len(self._tried))
        kept = [value / self._weight for value in self._kept[:length]] + unseen
        return list(zip(kept, [value / self._weight for value in self._tried[:length]] + unseen, strict=True))


@dataclass
class ChainSurvival:
    """Expected kept tokens of a chain. `row`: any number that names a row while it lives; None where none's luck is asked for."""

    _depths: Shares = field(default_factory=lambda: _prior_shares())
    _rows: dict[int, Record] = field(default_factory=dict)
    _all: Record = field(default_factory=lambda: _prior())

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """A step of one row: `accepted` of a chain of `drafted` tokens were kept."""
        tested = min(accepted + 1, drafted)
        self._depths.fade()
        self._depths.add(tested, range(accepted))
        self._all.add(accepted, tested)
        self._rows.setdefault(row, Record()).add(accepted, tested, ROW_DECAY)

    def observe_all(self, outcomes: Mapping[Outcome, int], steps: int) -> None:
        """So many steps, of rows whose luck nobody asks for: how often each outcome came. All count as if they came last."""
        self._depths.fade(steps)
        for (asked, accepted, *_), count in outcomes.items():
            self._depths.add(min(accepted + 1, asked), range(accepted), count)

    def forget(self, rows: set[int]) -> None:
        """Keep the records of these rows only."""
        self._rows = {row: record for row, record in self._rows.items() if row in rows}

    def doubt(self, most: float) -> None:
        """What is known counts for `most` observations at most: news is to be believed soon."""
        self._depths.limit(most)

    def curve(self, length: int, row: int | None = None) -> list[float]:
        """S(1) .. S(length); of one row, or of the average one."""
        scale = 1.0 if row is None else self._luck(row)
        survival, conditional, curve = 1.0, PRIOR, []
        weight = ALMOST_NOTHING
        for kept, tried in self._depths.counts(length):
            conditional, weight = (kept + weight * conditional) / (tried + weight), LEAN_WEIGHT
            survival *= min(conditional * scale, 1.0)
            curve.append(survival)
        return curve

    def expected(self, num_nodes: int, row: int | None = None) -> float:
        """Kept tokens of a chain of `num_nodes`; of one row, or of the average one."""
        return sum(self.curve(num_nodes, row))

    def expected_of(self, sizes: Sequence[int]) -> list[float]:
        """`expected` of several lengths, of the average row."""
        sums = [0.0, *accumulate(self.curve(max(sizes)))]
        return [sums[size] for size in sizes]

    def _luck(self, row: int) -> float:
        """This row's acceptance over everybody's, its own record counting by its size."""
        if row not in self._rows:
            return 1.0
        average = self._all.mean(PRIOR, ALMOST_NOTHING)
        return self._rows[row].mean(average, ROW_WEIGHT) / average if average > 0 else 1.0


@dataclass
class NestedYield:
    """Expected kept tokens of a tree of n nodes that is the tree of n - 1 and a node: sum of P(its n-th node is kept)."""

    _nodes: Shares = field(default_factory=lambda: _prior_shares())

    def observe_all(self, outcomes: Mapping[Outcome, int], steps: int) -> None:
        """So many steps: how often each outcome came, as far as its budgets are known. All count as if they came last."""
        self._nodes.fade(steps)
        for (asked, _, _, budgets), count in outcomes.items():
            if budgets is not None:
                self._nodes.add(asked, [node - 1 for node in budgets], count)

    def doubt(self, most: float) -> None:
        """What is known counts for `most` observations at most: news is to be believed soon."""
        self._nodes.limit(most)

    def expected_of(self, sizes: Sequence[int]) -> list[float]:
        """Kept tokens of trees of several sizes. A node seen rarely is to the one before it as that one is to its own, or as the
        logarithm has it if that is more: its share falls like 1 / n, in bushy trees."""
        share, ratio, sums = 1.0, PRIOR, [0.0]
        for node, (kept, tried) in enumerate(self._nodes.counts(max(sizes))):
            weight = LEAN_WEIGHT / max(share, LEAST_SHARE) if node else ALMOST_NOTHING
            ratio = max(ratio, node / (node + 1))
            before, share = share, (kept + weight * ratio * share) / (tried + weight)
            ratio = min(share / before, 1.0) if before else 0.0
            sums.append(sums[-1] + share)
        return [sums[size] for size in sizes]


@dataclass
class TreeYield:
    """Expected kept tokens of a tree of n nodes."""

    _sizes: dict[int, Record] = field(default_factory=lambda: {1: _prior()})
    _ran_out: dict[int, Record] = field(default_factory=lambda: {1: _prior()})  # a single node that is kept has no children
    _fitted: tuple[float, float] | None = None  # s and b, until a few trees more were seen
    _age: int = 0  # trees seen since

    def observe_all(self, outcomes: Mapping[Outcome, int], steps: int) -> None:
        """So many steps: how often each outcome came. All count as if they came last."""
        for record in (*self._sizes.values(), *self._ran_out.values()):
            record.scale(DECAY**steps)
        for (asked, accepted, ran_out, _), count in outcomes.items():
            self._sizes.setdefault(asked, Record()).add(count * accepted, count, decay=1.0)
            self._ran_out.setdefault(asked, Record()).add(count * ran_out, count, decay=1.0)
        self._age += sum(outcomes.values())
        if self._age >= FIT_EVERY:
            self._fitted = None

    def doubt(self, most: float) -> None:
        """What is known counts for `most` observations at most: news is to be believed soon."""
        for record in self._sizes.values():
            record.limit(most)
        self._fitted = None

    def expected(self, num_nodes: int) -> float:
        """Kept tokens of a tree of `num_nodes`."""
        return self.expected_of([num_nodes])[0]

    def expected_of(self, sizes: Sequence[int]) -> list[float]:
        """`expected` of several sizes: their own means, leaning on the curve that fits all of them best."""
        if self._fitted is None:
            self._fitted, self._age = self._fit(), 0
        scale, bend = self._fitted
        none = Record()
        return [size and self._sizes.get(size, none).mean(scale * _shape(size, bend), FIT_WEIGHT) for size in sizes]

    def _fit(self) -> tuple[float, float]:
        """s and b, by least squares; b = 1 unless the numbers speak against it more than chance would."""
        seen = [(size, record.kept, record.tried) for size, record in self._sizes.items() if record.tried > ALMOST_NOTHING]
        # One step strays the further, the more is kept on average (as if in a run of equal chances), so a few unlucky large trees
        # say less than as many small ones.
        usual = sum(kept for _, kept, _ in seen) / sum(tried * _shape(size, 1.0) for size, _, tried in seen)
        means = [usual * _shape(size, 1.0) for size, _, _ in seen]
        weights = [1 / max(mean * (1 + mean), LEAST_VARIANCE) for mean in means]
        least, deviation = self._steepness()
        best = (math.inf, 0.0, 0.0)
        for bend in BENDS:
            terms = [(w, _shape(size, bend), kept, tried) for w, (size, kept, tried) in zip(weights, seen, strict=True)]
            scale = sum(w * g * kept for w, g, kept, _ in terms) / sum(w * g * g * tried for w, g, _, tried in terms)
            error = sum(w * tried * (kept / tried - scale * g) ** 2 for w, g, kept, tried in terms)
            strange = abs(bend - 1) / BEND_DEVIATION + (max(0.0, least - bend) / deviation) ** 2
            best = min(best, (error + strange, scale, bend))
        return best[1:]

    def _steepness(self) -> tuple[float, float]:
        """The least b that trees speak for that ran out, and its deviation: one node more would have been kept in as many of
        them as such nodes are kept at all, c = K / (K + 1 - X) for K kept nodes and a share X that ran out, as in a chain. K
        then grows by X c a node, the family by K b / ((1 + n) ln(1 + n))."""
        steep = total = 0.0
        for size, record in self._ran_out.items():
            ran_out, tried = record.kept, record.tried
            if tried > ALMOST_NOTHING:
                kept = self._sizes[size].kept
                steep += ran_out * (1 + size) * math.log(1 + size) / ((kept - ran_out) / tried + 1)
                total += tried
        return steep / total, STEEPNESS[0] * steep / total + STEEPNESS[1] / total**0.5


def _prior() -> Record:
    return Record(PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT)


def _prior_shares() -> Shares:
    return Shares([PRIOR * PRIOR_WEIGHT], [PRIOR_WEIGHT])


def _shape(num_nodes: int, bend: float) -> float:
    return math.log2(1 + num_nodes) ** bend
