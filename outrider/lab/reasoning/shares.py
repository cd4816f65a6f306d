"""Shares and survival curves with their uncertainty. Problems are what varies, so problems are resampled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.lab.intervals import RESAMPLES, ratio_of_sums
from outrider.lab.result import Interval

LEVEL = 0.95


def ratio(above: Sequence[float], below: Sequence[float], least: float = 0.0, most: float = math.inf) -> Interval | None:
    """sum(above) / sum(below) by problem, which lies between `least` and `most`. None where nothing is below."""
    pairs = [(a, b) for a, b in zip(above, below, strict=True) if b > 0]
    if not pairs:
        return None
    if len(pairs) == 1:  # says nothing about other problems
        return Interval(value=pairs[0][0] / pairs[0][1], low=least, high=most, level=LEVEL)
    return ratio_of_sums([a for a, _ in pairs], [b for _, b in pairs], LEVEL)


def proportion(kept: Sequence[int], tested: Sequence[int]) -> Interval | None:
    """The interval of a share, with problems resampled. Where all or none were kept, problems do not vary, and resampling
    them would claim certainty: then the exact binomial interval (Clopper & Pearson 1934), as if tests were independent."""
    found = ratio(kept, tested, most=1.0)
    return found if found is None or 0 < found.value < 1 else _with_exact_ends(found, int(sum(tested)))


def survival_curve(kept: np.ndarray, reached: np.ndarray, seed: int = 0) -> list[Interval]:
    """S(1), S(2), ... from (problems, positions) counts of drafts that came to a position and were kept there.

    Product-limit estimate (Kaplan & Meier 1958), so drafts that a text's end cut short count as far as they go. The curve ends
    where no draft came; a resample that has none there says nothing about it. Shares of 0 and 1: as in `proportion`.
    """
    length = int((reached.sum(0) > 0).cumprod().sum())
    if not length:
        return []
    problems = np.flatnonzero(reached[:, 0])
    kept, reached = kept[problems, :length], reached[problems, :length]
    value = np.cumprod(kept.sum(0) / reached.sum(0))
    low, high = _resampled(kept, reached, seed) if len(problems) > 1 else np.repeat([[0.0], [1.0]], length, 1)
    found = [
        Interval(value=float(v), low=float(a), high=float(b), level=LEVEL) for v, a, b in zip(value, low, high, strict=True)
    ]
    counts = reached.sum(0).tolist()
    return [one if 0 < one.value < 1 else _with_exact_ends(one, n) for one, n in zip(found, counts, strict=True)]


def _resampled(kept: np.ndarray, reached: np.ndarray, seed: int) -> np.ndarray:
    """(2, positions) ends of intervals."""
    chosen = np.random.default_rng(seed).integers(len(reached), size=(RESAMPLES, len(reached)))
    below = reached[chosen].sum(1)
    with np.errstate(invalid="ignore"):
        curves = np.cumprod(np.where(below > 0, kept[chosen].sum(1) / np.where(below > 0, below, 1), np.nan), 1)
    return np.nanpercentile(curves, [50 * (1 - LEVEL), 50 * (1 + LEVEL)], axis=0)


def _with_exact_ends(found: Interval, count: int) -> Interval:
    """The interval of a share that is 0 or 1."""
    reach = ((1 - LEVEL) / 2) ** (1 / count)  # the share with which `count` in a row happen so rarely
    ends = {"low": min(found.low, reach)} if found.value >= 1 else {"high": max(found.high, 1 - reach)}
    return found.model_copy(update=ends)
