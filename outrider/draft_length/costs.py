"""Seconds of a step by how many nodes it drafts and by how many it asks for, measured while
running.

A Kalman filter over the logarithms of the seconds of all sizes at once. It assumes that a slow
minute is slow for every size, so a size timed an hour ago stays comparable with the one in use;
that each node costs about the same; and that neighbouring sizes differ little from that. A clock
errs upwards: a time far too long counts as a time a little too long. How much two times of one size
differ says how noisy the clock is: alongside busy processes each time counts for less.

After longer texts a pass reads more of the cache, and each further node looks at all of it. So two
more numbers are learned: how all sizes grow with the logarithm of the texts' tokens, and how much
more each node does.

Where the target is a mixture, a pass also costs by the distinct experts that it reads (`experts.py`).
So one more number is learned: the power of these that a step's seconds grow with. Times are then
compared as if of equal experts, and a size costs what its expected experts make of it.

Drafters offer less than asked: look-ups find nothing, stop rules stop early. With W the nodes of
the widest row and c(i) the cost of a step that drafts i nodes, c(0) that of one which asked and was
offered nothing,

    E[seconds | n asked] = c(0) + sum over i = 1..n of P(W >= i) (c(i) - c(i - 1))
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.draft_length.experts import ExpertsByNodes
from outrider.draft_length.survival import DECAY, LONG, NOTHING, FadingMean, Shares

EMPTY_DRAFT = -1  # in place of a size: nodes were asked for and none was offered
# of a plain step, that a node costs: mean and deviation before anything was measured;
NODE = 0.05
NODE_DEVIATION = 0.2
# the deviation is also that of a plain step's growth with its texts, from the first tokens to 1.7
# times LONG (a logarithm of 1), and of the power of its experts
LEVEL_DEVIATION = 3.0  # of the logarithm of a plain step's seconds
# relative deviation of one size from its neighbour, and of the growth of one from the other's
BUMP = 0.05
NOISE = 0.05  # relative error of a time at least
DRIFT = 0.02  # relative change of the whole machine from step to step
# steps in which sizes may change against one another as much as they may differ at first (texts
# grow)
RENEWAL = 300
ELSEWHERE = 0.01  # share of the first variances that comes back with times from another hour
# of the logarithm, that a time may be too short: beyond it, earlier times were of something else
SPOILT = 1.0
MAX_ERROR = 3.0  # standard deviations that a time may be too long


class LengthCosts:
    """Steps of one number of rows that draft at most `max_nodes` in a row."""

    def __init__(self, max_nodes: int) -> None:
        sizes = np.arange(max_nodes + 2.0)
        sizes[EMPTY_DRAFT] = 0
        count = len(sizes)
        # a size's logarithm: its own number and, times the texts' length, growth and growth per node,
        # times the logarithm of its experts, the last one
        self._own = np.eye(count, count + 3)
        self._growth = np.zeros((count, count + 3))
        self._growth[:, count], self._growth[:, count + 1] = 1, sizes
        slope = NODE_DEVIATION * sizes / (1 + NODE * sizes)
        shape = BUMP**2 * np.minimum.outer(sizes, sizes)
        shape[EMPTY_DRAFT, EMPTY_DRAFT] = BUMP**2
        self._shape, self._level = (
            self._own.T @ part @ self._own for part in (shape, np.ones((count, count)))
        )
        self._prior = (
            LEVEL_DEVIATION**2 * self._level
            + self._own.T @ np.outer(slope, slope) @ self._own
            + self._shape
        )
        self._prior[count:, count:] = np.diag([NODE_DEVIATION**2, BUMP**2, NODE_DEVIATION**2])
        self._known = np.append(np.log1p(NODE * sizes), np.zeros(3))
        self.experts = ExpertsByNodes()
        self._base: float | None = None  # experts of a plain step when the first were seen
        self._spread = self._prior
        self._max_nodes = max_nodes
        self._timed_at = 0
        self._noise = FadingMean()  # variance of one time
        # its logarithm, and how many it was the median of, by size
        self._latest: dict[int, tuple[float, int]] = {}
        # position i: steps with W > i among those that asked for more than i
        self._offered = Shares()
        self.times: Counter[int] = Counter()  # by size

    def observe(
        self,
        size: int,
        seconds: float,
        now: int = 0,
        count: int = 1,
        context: float = 0.0,
        experts: float | None = None,
    ) -> None:
        """The time of a step that drafted `size` nodes (or EMPTY_DRAFT) after texts of `context`
        tokens in all, or the median of `count` alike. `now`: steps so far; `experts`: distinct ones
        that its pass read, where that is known."""
        if size > self._max_nodes:
            return
        steps = now - self._timed_at
        self._timed_at = now
        self.times[size] += count
        self._spread = self._spread + steps * (DRIFT**2 * self._level + self._shape / RENEWAL)
        if experts:
            self.experts.observe(max(size, 0), experts, count)
            self._base = self._base or self.experts.plain
        reading = self._readings(context, experts)[size]
        error = math.log(seconds) - float(reading @ self._known)
        if error < -SPOILT:
            self._spread = self._spread + self._prior
        column = self._spread @ reading
        if now:  # in this hour
            self._learn_noise(size, error + float(self._known[size]), count)
        total = float(column @ reading) + self._noise_of_one() / count
        error = min(error, MAX_ERROR * count * math.sqrt(total))
        self._known = self._known + column * (error / total)
        self._spread -= np.outer(column, column / total)

    def _learn_noise(self, size: int, log_s: float, count: int) -> None:
        """Compare a time with the latest one of the same size, whatever the filter expected of
        either."""
        before, count_before = self._latest.get(size, (log_s, 0))
        self._latest[size] = log_s, count
        if count_before:
            weight = 1 / (1 / count + 1 / count_before)
            squared = min(weight * (log_s - before) ** 2, MAX_ERROR**2 * self._noise_of_one())
            self._noise.add(weight * squared, weight, DECAY**weight)

    def _noise_of_one(self) -> float:
        """Variance of the logarithm of one time."""
        return max(NOISE**2, self._noise.mean(NOISE**2, NOTHING))

    def observe_offers(self, steps: Sequence[tuple[int, int]]) -> None:
        """Takes in steps that asked for drafts: nodes asked for and nodes drafted in the widest
        row. All count as if they came last."""
        self._offered.fade(len(steps))
        for asked, width in steps:
            self._offered.add(asked, [1.0] * min(width, asked))

    def unsettle(self) -> None:
        """Trust known costs less: in another hour the machine may have been faster and nodes
        cheaper."""
        self._spread = self._spread + ELSEWHERE * self._prior

    def copy(self) -> LengthCosts:
        """A first guess for another number of rows: nodes compare as they do here."""
        other = LengthCosts(self._max_nodes)
        other._known = self._known
        other._timed_at = self._timed_at
        other.times = Counter(self.times)
        other._noise = replace(self._noise)
        other.experts = self.experts.copy()
        other._spread = self._spread + ELSEWHERE * self._prior + LEVEL_DEVIATION**2 * self._level
        return other

    def _readings(self, context: float, experts: float | None = None) -> np.ndarray:
        """Row `size`: what is read off `_known` for a step of this size, whose pass reads `experts`
        distinct ones, else as many as expected."""
        readings = self._own + math.log1p(context / LONG) * self._growth
        if self._base is not None:
            expected = self.expected_experts()
            expected.append(expected[0])  # an empty draft has a plain pass
            readings[:, -1] = np.log((experts or np.array(expected)) / self._base)
        return readings

    def drafted(self, context: float = 0.0) -> list[float]:
        """Seconds by nodes drafted, 0 to `max_nodes`, and of an empty draft. A plain step never
        costs more than another."""
        seconds: list[float] = np.exp(self._readings(context) @ self._known).tolist()
        return [min(seconds), *seconds[1:]]

    def expected_experts(self) -> list[float]:
        """Distinct experts by nodes drafted, 0 to `max_nodes`; empty where they are not known."""
        if self._base is None:
            return []
        return [self.experts.expected(size) for size in range(self._max_nodes + 1)]

    def asked(self, context: float = 0.0) -> list[float]:
        """Seconds by nodes asked for, 0 to `max_nodes`."""
        plain, *drafting, empty = self.drafted(context)
        costs = [plain]
        before = empty
        reached = 1.0
        total = empty
        for cost, (wide, tried) in zip(
            drafting, self._offered.counts(self._max_nodes), strict=True
        ):
            reached = min(wide / tried, reached) if tried else reached
            total += reached * (cost - before)
            costs.append(total)
            before = cost
        return costs
