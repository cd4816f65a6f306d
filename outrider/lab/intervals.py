"""Ratios with their uncertainty: prompts are what varies, so prompts are what is resampled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import bootstrap

from outrider.lab.result import Interval

RESAMPLES = 2000


def ratio_of_sums(above: Sequence[float], below: Sequence[float], level: float = 0.95, seed: int = 0) -> Interval:
    """sum(above) / sum(below) over the same prompts, with a bootstrap interval (percentiles, prompts resampled in pairs).

    One prompt says nothing about others: its interval is 0..infinity.
    """
    if len(above) != len(below) or not above:
        raise ValueError(f"a ratio needs the same prompts on both sides, got {len(above)} and {len(below)}")
    value = sum(above) / sum(below)
    if len(above) == 1:
        return Interval(value=value, low=0.0, high=math.inf, level=level)
    found = bootstrap(
        (np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)), _ratio, paired=True, vectorized=True,
        n_resamples=RESAMPLES, confidence_level=level, method="percentile", rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Interval(value=value, low=float(found.low), high=float(found.high), level=level)


def _ratio(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
    return above.sum(axis=axis) / below.sum(axis=axis)
