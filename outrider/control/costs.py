"""What a step costs as a function of how many nodes it drafts: measured while running, no model of the hardware.

Each size has the mean of its latest times and leans on a straight line through all sizes, because draft passes are paid
per token and target passes nearly so. The clock of a shared machine has outliers, upwards only: times far above a size's
middle one do not count. A step without drafts never costs more than one with.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

LATEST = 16  # times kept per size
OUTLIER = 1.5  # times the middle one: beyond it a time does not count
LINE_WEIGHT = 1.0  # times that the line counts for at each size


@dataclass
class Times:
    """The latest seconds of one kind of step, and their mean without outliers."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    mean: float = 0.0

    def add(self, seconds: float) -> None:
        self.latest.append(seconds)
        limit = OUTLIER * median_low(self.latest)
        usual = [value for value in self.latest if value <= limit]
        self.mean = sum(usual) / len(usual)


@dataclass
class CostCurve:
    """Seconds of a whole step that drafted `n` nodes in its longest row."""

    _sizes: dict[int, Times] = field(default_factory=dict)
    _intercept: float = 0.0
    _slope: float = 0.0
    _lowest: float = 0.0  # mean

    def observe(self, num_nodes: int, seconds: float) -> None:
        self._sizes.setdefault(num_nodes, Times()).add(seconds)
        self._fit()

    def known(self) -> dict[int, float]:
        """Sizes that were measured, with their means."""
        return {size: times.mean for size, times in sorted(self._sizes.items())}

    def seconds(self, num_nodes: int) -> float | None:
        """None before anything was measured."""
        if not self._sizes:
            return None
        value = self._intercept + self._slope * num_nodes
        if num_nodes in self._sizes:
            times = self._sizes[num_nodes]
            count = len(times.latest)
            value = (count * times.mean + LINE_WEIGHT * value) / (count + LINE_WEIGHT)
        return min(value, self._lowest) if num_nodes == 0 else max(value, 0.5 * self._lowest)

    @classmethod
    def between(cls, lower: CostCurve, upper: CostCurve, share: float) -> CostCurve:
        """A first guess of a curve that lies `share` of the way from one to the other; counts for one time per size."""
        curve = cls()
        for size in sorted(lower.known() | upper.known()):
            low, high = lower.seconds(size), upper.seconds(size)
            if low is not None and high is not None:
                curve.observe(size, low + share * (high - low))
        return curve

    def _fit(self) -> None:
        """Least squares through the means, each weighted by how many times it is made of; the slope is never negative."""
        points = [(size, times.mean, len(times.latest)) for size, times in self._sizes.items()]
        total = sum(weight for *_, weight in points)
        center = sum(size * weight for size, _, weight in points) / total
        level = sum(mean * weight for _, mean, weight in points) / total
        spread = sum(weight * (size - center) ** 2 for size, _, weight in points)
        rise = sum(weight * (size - center) * (mean - level) for size, mean, weight in points)
        self._slope = max(rise / spread, 0.0) if spread else 0.0
        self._intercept = level - self._slope * center
        self._lowest = min(mean for _, mean, _ in points)
