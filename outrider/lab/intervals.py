"""Ratios with their uncertainty: prompts are what varies, so prompts are what is resampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Interval:
    """sum(above) / sum(below) over the same prompts, with a bootstrap interval (percentiles,
    prompts resampled in pairs).

    One prompt says nothing about others: its interval is 0..infinity.
    """
    return _resampled(_ratio, above, below)


def ratio_of_rates(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
) -> Interval:
    """(sum(tokens) / sum(seconds)) / the same of the base, over the same prompts, with an interval
    as of `ratio_of_sums`.

    For two sides that emitted different numbers of tokens in the time that counts.
    """
    return _resampled(_ratio_of_rates, tokens, seconds, base_tokens, base_seconds)


def _resampled(statistic: Callable[..., np.ndarray], *columns: Sequence[float]) -> Interval:
    """A statistic of columns with a value for each prompt, prompts resampled. Raises ValueError
    where these are not the same."""
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(f"a ratio needs the same prompts on both sides, got {lengths}")
    arrays = tuple(np.asarray(column, dtype=np.float64) for column in columns)
    value = float(statistic(*arrays))
    if len(arrays[0]) == 1:
        return Interval.unknown(value)
    bootstrap = scipy.stats.bootstrap(
        arrays,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        batch=max(1, AT_ONCE // len(arrays[0])),
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(value=value, low=float(bootstrap.low), high=float(bootstrap.high))


def _ratio(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
    return above.sum(axis=axis) / below.sum(axis=axis)


def _ratio_of_rates(
    tokens: np.ndarray,
    seconds: np.ndarray,
    base_tokens: np.ndarray,
    base_seconds: np.ndarray,
    axis: int = -1,
) -> np.ndarray:
    return _ratio(tokens, seconds, axis) / _ratio(base_tokens, base_seconds, axis)
