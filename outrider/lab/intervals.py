"""Ratios with their uncertainty: prompts are what varies, so prompts are what is resampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.lab.result import Interval
from outrider.lazy import scipy

WORTH = 1.02  # speedup below which drafting is not worth the trouble
RESAMPLES = 2000
AT_ONCE = 1 << 21  # prompts of all resamples in memory at a time


def proportion(count: int, total: int) -> Interval:
    """count / total with Wilson's interval, as if trials were independent."""
    bounds = scipy.stats.binomtest(count, total).proportion_ci(method="wilson")
    return Interval(value=count / total, low=float(bounds.low), high=float(bounds.high))


def ratio_of_sums(
    above: Sequence[float], below: Sequence[float], *base: Sequence[float]
) -> Interval:
    """sum(above) / sum(below), over the same ratio of `base` where its two columns are given: a value
    a prompt, with a bootstrap interval (percentiles, prompts resampled).

    One prompt says nothing about others: its interval is 0..infinity. Raises ValueError where the
    columns are not of the same prompts.
    """
    columns = (above, below, *base)
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(f"a ratio needs the same prompts on both sides, got {lengths}")
    arrays = tuple(np.asarray(column, dtype=np.float64) for column in columns)
    value = float(_ratio(*arrays))
    if len(arrays[0]) == 1:
        return Interval.unknown(value)
    bootstrap = scipy.stats.bootstrap(
        arrays,
        _ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        batch=max(1, AT_ONCE // len(arrays[0])),
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(value=value, low=float(bootstrap.low), high=float(bootstrap.high))


def _ratio(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
    above, below, *base = (column.sum(axis=axis) for column in columns)
    ratio: np.ndarray = above / below
    return ratio / (base[0] / base[1]) if base else ratio
