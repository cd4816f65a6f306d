"""Ratios with their uncertainty: prompts are what varies, so prompts are what is resampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import binomtest, bootstrap

from outrider.lab.result import Interval

RESAMPLES = 2000
AT_ONCE = 1 << 21  # prompts of all resamples in memory at a time


def proportion(count: int, total: int) -> Interval:
    """count / total with Wilson's interval, as if trials were independent."""
    found = binomtest(count, total).proportion_ci(method="wilson")
    return Interval(value=count / total, low=float(found.low), high=float(found.high))


def ratio_of_sums(above: Sequence[float], below: Sequence[float], level: float = 0.95, seed: int = 0) -> Interval:
    """sum(above) / sum(below) over the same prompts, with a bootstrap interval (percentiles, prompts resampled in pairs).

    One prompt says nothing about others: its interval is 0..infinity.
    """
    if len(above) != len(below) or not above:
        raise ValueError(f"a ratio needs the same prompts on both sides, got {len(above)} and {len(below)}")
    return _resampled(_ratio, (above, below), level, seed)


def ratio_of_rates(
    tokens: Sequence[float], seconds: Sequence[float], base_tokens: Sequence[float], base_seconds: Sequence[float],
    level: float = 0.95,
) -> Interval:  # fmt: skip
    """(sum(tokens) / sum(seconds)) / the same of the base, over the same prompts, with an interval as of `ratio_of_sums`.

    For two sides that emitted different numbers of tokens in the time that counts.
    """
    columns = (tokens, seconds, base_tokens, base_seconds)
    if len({len(column) for column in columns}) > 1 or not tokens:
        raise ValueError(f"rates need the same prompts on both sides, got {[len(column) for column in columns]}")
    return _resampled(_ratio_of_rates, columns, level)


def _resampled(
    statistic: Callable[..., np.ndarray], columns: Sequence[Sequence[float]], level: float, seed: int = 0
) -> Interval:
    """A statistic of columns with a value for each prompt, prompts resampled."""
    arrays = tuple(np.asarray(column, dtype=np.float64) for column in columns)
    value = float(statistic(*arrays))
    if len(arrays[0]) == 1:
        return Interval.unknown(value).model_copy(update={"level": level})
    found = bootstrap(
        arrays, statistic, paired=True, vectorized=True, n_resamples=RESAMPLES, confidence_level=level, method="percentile",
        batch=max(1, AT_ONCE // len(arrays[0])), rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Interval(value=value, low=float(found.low), high=float(found.high), level=level)


def _ratio(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
    return above.sum(axis=axis) / below.sum(axis=axis)


def _ratio_of_rates(
    tokens: np.ndarray, seconds: np.ndarray, base_tokens: np.ndarray, base_seconds: np.ndarray, axis: int = -1
) -> np.ndarray:
    return _ratio(tokens, seconds, axis) / _ratio(base_tokens, base_seconds, axis)
