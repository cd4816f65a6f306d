"""Intervals of ratios of sums, by resampling texts.

Texts differ, steps within a text are alike: so whole texts are drawn, not steps. Where a drafter learns, one text's result
depends on the texts before it; then blocks of consecutive texts are drawn instead (Carlstein 1986; n^(1/3) texts each), which
keeps the dependence of neighbours. What no interval knows: that another order of the log would have taught more or less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.lab.intervals import ratio_of_rates, ratio_of_sums
from outrider.lab.result import Interval

MIN_BLOCKS = 5  # texts or blocks; an interval from fewer would be a guess

Sums = tuple[Sequence[float], Sequence[float]]  # numerators and denominators, one of each per text, in the order of the replay


def ratio_interval(sums: Sums, *, blocks: bool) -> Interval:
    """sum(numerators) / sum(denominators). Unknown for too few texts."""
    above, below = (column.tolist() for column in _units(sums, blocks=blocks))
    return ratio_of_sums(above, below) if len(above) >= MIN_BLOCKS else Interval.unknown(sum(above) / sum(below))


def gain_interval(new: Sums, old: Sums, *, blocks: bool) -> Interval | None:
    """Ratio of `new` over the ratio of `old`, less 1; both over the same texts. None for too few of them."""
    a, b = _units(new, blocks=blocks)
    c, d = _units(old, blocks=blocks)
    if len(a) < MIN_BLOCKS:
        return None
    found = ratio_of_rates(a.tolist(), b.tolist(), c.tolist(), d.tolist())
    return found.model_copy(update={"value": found.value - 1, "low": found.low - 1, "high": found.high - 1})


def block_length(num_texts: int) -> int:
    """Consecutive texts per block: n^(1/3), rounded."""
    return max(1, round(num_texts ** (1 / 3)))


def _units(sums: Sums, *, blocks: bool) -> list[np.ndarray]:
    """What is drawn: texts, or blocks of them."""
    num_texts = len(sums[0])
    starts = np.arange(0, num_texts, block_length(num_texts) if blocks else 1)
    return [np.add.reduceat(np.asarray(column, dtype=np.float64), starts) for column in sums]
