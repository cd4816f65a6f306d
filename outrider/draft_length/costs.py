"""What a step costs as a function of how many nodes it drafts: measured while running, no model of the hardware.

A Kalman filter over the seconds of all sizes at once. What it takes for granted:

- a machine has slow minutes, and they are slow for every size: what one size takes longer, the others are expected to take
  longer, too. So a size that was timed an hour ago stays comparable with the one in use;
- apart from that, sizes lie about on a straight line, because draft tokens are paid one by one and target passes nearly so;
- kernels work in tiles of eight tokens: between a pass over 8, 16, ... tokens and the next there may be a step (not with ours).

The clock of a shared machine has outliers, upwards only: times far above what is expected do not count unless they go on, and
a time far below says that the earlier ones were spoilt. A step without drafts never costs more than one with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

VAIN = -1  # in place of a size: asked, and offered nothing
LATEST = 16  # times kept per size
OUTLIER = 1.5  # times the expected one: beyond it a time does not count
STUBBORN = 3  # outliers in a row that are the new truth
SPOILT = 5  # times the newest one: where so much was expected from fewer than STUBBORN times, these were of something else
NOISE = 0.05  # relative error of a time, at first; then as measured, within these bounds
LEAST_NOISE, MOST_NOISE, NOISE_SHARE = 0.02, 0.15, 0.05
DRIFT = 0.02  # relative change of the whole machine from step to step
ELSEWHEN = 0.3  # the same from one hour to another
OTHER_SLOPE = 0.02  # of a plain step, that a node may cost more or less then
BUMP = 0.05  # relative deviation of one size from the line through its neighbours
TILE, STEP = 8, 0.15  # tokens of a kernel's tile, and relative size of the step behind one
FIRST = 0.08  # relative size of the step to the first node, which wakes a draft model
RENEWAL = 300  # steps in which sizes may change against one another as much as they may differ at first (texts grow)
HAIR = 1 - 1e-8  # beyond what rounding adds
LEAST_SHARE = 0.3  # of the cheapest measured step, that a plain one costs at least: a line may lead anywhere
UNKNOWN = 1e6  # variance of what nothing is assumed about


@dataclass(frozen=True)
class Slope:
    """What a node may cost, as a share of a plain step: mean and standard deviation, before anything was measured."""

    mean: float = 0.0
    deviation: float = UNKNOWN**0.5


@dataclass
class Times:
    """The latest seconds of one kind of step, and their mean without outliers."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    _mean: float | None = None  # until the next time

    def add(self, seconds: float) -> None:
        self.latest.append(seconds)
        self._mean = None

    @property
    def mean(self) -> float:
        """0 before there is one."""
        if self._mean is None:
            limit = OUTLIER * median_low(self.latest) if self.latest else 0.0
            usual = [value for value in self.latest if value <= limit]
            self._mean = sum(usual) / max(len(usual), 1)
        return self._mean


class CostCurve:
    """Seconds of a whole step that drafted `n` nodes in its longest row, up to `most`; for `n` = VAIN of one that asked and was
    offered nothing: a draft model that stops before its first token has run a pass all the same."""

    def __init__(self, most: int = 64, slope: Slope = Slope()) -> None:
        sizes = np.arange(most + 2)
        sizes[VAIN] = 0
        self._nodes = sizes
        self._line = 1 + slope.mean * sizes  # of a plain step
        self._shape = _shape(sizes)
        self._prior = UNKNOWN + slope.deviation**2 * np.outer(sizes, sizes) + self._shape
        self._prior[VAIN, VAIN] += slope.deviation**2
        self._times: dict[int, Times] = {}
        self._mean: NDArray[np.float64] | None = None
        self._spread = self._prior
        self._noise = NOISE**2
        self._outliers = 0  # in a row

    def observe(self, num_nodes: int, seconds: float, age: int = 1, count: int = 1) -> None:
        """`seconds`: of one step, or the median of `count`. `age`: steps since the previous time, of other curves too; 0: seen
        at once with it. Steps of more than `most` nodes tell nothing."""
        if num_nodes >= len(self._line) - 1:
            return
        if self._is_spoilt(num_nodes, seconds):
            self._mean, self._times = None, {}
        self._times.setdefault(num_nodes, Times()).add(seconds)
        if self._mean is None:
            self._mean = self._line * (seconds / self._line[num_nodes])
            self._spread = self._prior * float(self._mean[0]) ** 2
        else:
            if age:
                self._drift(age)
            if self._is_outlier(num_nodes, seconds):
                return
        self._learn(num_nodes, seconds, count)

    def unsettle(self) -> None:
        """What is known was timed in another hour: every size by the same factor off, and nodes dearer or cheaper, as memory was
        faster or slower."""
        if self._mean is not None:
            nodes = OTHER_SLOPE * float(self._mean[0]) * self._nodes
            self._spread = self._spread + ELSEWHEN**2 * np.outer(self._mean, self._mean) + np.outer(nodes, nodes)

    def known(self) -> dict[int, float]:
        """Sizes that were measured, with the means of their latest times; not what was asked in vain."""
        return {size: times.mean for size, times in sorted(self._times.items()) if size != VAIN}

    def count(self, num_nodes: int) -> int:
        """Its latest times."""
        return len(self._times[num_nodes].latest) if num_nodes in self._times else 0

    @property
    def num_known(self) -> int:
        """Sizes that were measured."""
        return len(self._times) - (VAIN in self._times)

    def seconds(self, num_nodes: int) -> float | None:
        """None before any size was measured."""
        return self.seconds_of([num_nodes])[0] if self.num_known else None

    def seconds_of(self, sizes: Sequence[int]) -> list[float]:
        """`seconds` of several sizes. Some must have been measured."""
        assert self._mean is not None, "nothing was measured"
        believed = self._mean.tolist()
        lowest = min(believed[size] for size in self._times)
        plain = max(min(believed[0], HAIR * lowest), LEAST_SHARE * lowest)
        return [max(believed[size], plain) if size else plain for size in sizes]

    def doubts_of(self, sizes: Sequence[int]) -> list[float]:
        """Variance of the logarithm of each size's seconds over a plain step's. Some must have been measured."""
        assert self._mean is not None, "nothing was measured"
        scale = np.maximum(self._mean, LEAST_SHARE * float(self._mean.max()))
        spread = self._spread / np.outer(scale, scale)
        return [max(0.0, float(spread[size, size] + spread[0, 0] - 2 * spread[size, 0])) for size in sizes]

    @classmethod
    def between(cls, lower: CostCurve, upper: CostCurve, share: float) -> CostCurve:
        """A first guess of a curve that lies `share` of the way from one to the other; counts for one time per size."""
        curve = cls(len(lower._line) - 2)
        for size in sorted(lower.known() | upper.known()):
            low, high = lower.seconds(size), upper.seconds(size)
            if low is not None and high is not None:
                curve.observe(size, low + share * (high - low))
        return curve

    def _drift(self, age: int) -> None:
        """Steps later: everything may be slower or faster, and sizes have changed a little against one another."""
        assert self._mean is not None
        scaled = min(DRIFT * age**0.5, ELSEWHEN) * self._mean
        self._spread += scaled[:, None] * scaled + (float(self._mean[0]) ** 2 / RENEWAL) * self._shape

    def _is_spoilt(self, num_nodes: int, seconds: float) -> bool:
        """Whether the few times so far, from which all sizes were guessed, say nothing: of a first step that built a program, or
        of a machine that was asleep."""
        few = sum(len(times.latest) for times in self._times.values()) < STUBBORN
        return self._mean is not None and few and float(self._mean[num_nodes]) > SPOILT * seconds

    def _is_outlier(self, num_nodes: int, seconds: float) -> bool:
        """Whether a time does not count. Where too many do not, or one is far too low, what is known gives way: of this size
        where little was known of it, else of the whole machine."""
        assert self._mean is not None
        expected = float(self._mean[num_nodes])
        doubt = 2 * float(self._spread[num_nodes, num_nodes]) ** 0.5
        too_much = seconds > OUTLIER * max(expected, 0.0) + doubt
        if seconds < expected / OUTLIER - doubt or (too_much and self.count(num_nodes) <= STUBBORN):
            self._spread[num_nodes, num_nodes] += (expected - seconds) ** 2
        elif too_much:
            self._outliers += 1
            if self._outliers < STUBBORN:
                return True
            scaled = (seconds / expected - 1) * self._mean
            self._spread += scaled[:, None] * scaled
        self._outliers = 0
        return False

    def _learn(self, num_nodes: int, seconds: float, count: int) -> None:
        assert self._mean is not None
        column = self._spread[:, num_nodes].copy()
        error = seconds - float(self._mean[num_nodes])
        total = float(column[num_nodes]) + self._noise * seconds**2 / count
        relative = min(count * (error / seconds) ** 2, 9 * self._noise)
        if column[num_nodes] < self._noise * seconds**2:  # else the error tells of what was not known, not of the clock
            share = min(1.0, NOISE_SHARE * count)
            self._noise = min(max((1 - share) * self._noise + share * relative, LEAST_NOISE**2), MOST_NOISE**2)
        gain = column / total
        self._mean = self._mean + gain * error
        self._spread -= gain[:, None] * column


def _shape(sizes: NDArray[np.int_]) -> NDArray[np.float64]:
    """Covariances of the deviations from a line: a random walk over the sizes, with longer strides between tiles; what is asked
    in vain is near a plain step."""
    strides = np.where(sizes % TILE == 0, STEP**2, BUMP**2)
    strides[0], strides[1] = 0.0, FIRST**2
    walked = np.cumsum(strides)
    shape = np.minimum.outer(walked, walked)
    shape[VAIN, :] = shape[:, VAIN] = 0.0
    shape[VAIN, VAIN] = BUMP**2
    return shape
