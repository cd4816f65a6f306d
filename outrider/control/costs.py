"""What a step costs as a function of how many nodes it drafts: measured while running, no model of the hardware.

One curve per number of rows. A size that was seen often enough is its own running mean; sizes in between and beyond are
read off a straight line through everything seen, because draft passes are paid per token and target passes nearly so.
The clock of a shared machine has outliers, so a value far above what is known counts only in part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

MEMORY = 0.1  # weight of the newest value once a mean has settled
SEEN_ENOUGH = 3  # values from which a size speaks for itself
OUTLIER = 2.0  # times the mean: what a single value may count for at most


@dataclass
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        if self.count >= SEEN_ENOUGH:
            seconds = min(seconds, OUTLIER * self.value)
        self.count += 1
        self.value += max(MEMORY, 1 / self.count) * (seconds - self.value)


@dataclass
class CostCurve:
    """Seconds of a whole step that drafted `n` nodes in its longest row."""

    _means: dict[int, _Mean] = field(default_factory=dict)

    def observe(self, num_nodes: int, seconds: float) -> None:
        self._means.setdefault(num_nodes, _Mean()).add(seconds)

    def known(self) -> dict[int, float]:
        """Sizes that were measured, with their means."""
        return {size: mean.value for size, mean in sorted(self._means.items())}

    def seconds(self, num_nodes: int) -> float | None:
        """None before anything was measured."""
        mean = self._means.get(num_nodes)
        if mean is not None and mean.count >= SEEN_ENOUGH:
            return mean.value
        if not self._means:
            return None
        return self._line(num_nodes)

    def _line(self, num_nodes: int) -> float:
        """Least squares through the means, each weighted by how often it was seen; its slope is never negative."""
        sizes = np.array(list(self._means), dtype=float)
        values = np.array([mean.value for mean in self._means.values()])
        weights = np.array([min(mean.count, 1 / MEMORY) for mean in self._means.values()])
        center, level = np.average(sizes, weights=weights), np.average(values, weights=weights)
        spread = np.average((sizes - center) ** 2, weights=weights)
        slope = 0.0 if spread == 0 else np.average((sizes - center) * (values - level), weights=weights) / spread
        return float(max(level + max(slope, 0.0) * (num_nodes - center), 0.1 * level))
