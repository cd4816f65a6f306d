"""The numbers of a plot: how they are written, and the table of them that stands beside or instead of the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.report.document import Column, Plot, Series, Table

Point = tuple[float | None, float | None, float | None]  # value, low, high


def finite(values: Sequence[float | None] | None, count: int) -> list[float | None]:
    """`count` values; None where there is no value, or no drawable one."""
    found = list(values) if values is not None else [None] * count
    if len(found) != count:
        raise ValueError(f"{len(found)} values over {count} of x")
    return [None if value is None or not math.isfinite(value) else float(value) for value in found]


def short(value: float | None) -> str:
    """For a tick of an axis: three significant digits, no more than needed: 0.0123, 1.5, 48, 1234, 1.2e-05."""
    text = figure(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def figure(value: float | None) -> str:
    """For a measured value: three significant digits, whole from 100 on: 0.0123, 1.50, 48.0, 1234. A dash where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.3g}" if not 1e-4 <= abs(value) < 1e7 else f"{value:.{_decimals(value)}f}"


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """'1.52 [1.48, 1.60]', all to the same decimal; or the value alone."""
    if value is None or (low is None and high is None):
        return figure(value)
    size = max(abs(end) for end in (value, low, high) if end is not None)
    if not 1e-4 <= size < 1e7:
        return f"{figure(value)} [{figure(low)}, {figure(high)}]"
    digits = _decimals(abs(value) if abs(value) > size / 100 else size)
    written = ("-" if end is None else f"{end:.{digits}f}" for end in (low, high))
    return f"{value:.{digits}f} [{', '.join(written)}]"


def _decimals(value: float) -> int:
    return max(0, 2 - math.floor(math.log10(abs(value))))


def points(series: Series, count: int) -> list[Point]:
    """Each x's values. Raises ValueError where the series has another length than x."""
    columns = (finite(values, count) for values in (series.y, series.low, series.high))
    return list(zip(*columns, strict=True))


def caption(plot: Plot) -> str:
    """The title of the table that stands instead of the picture."""
    axes = " over ".join(filter(None, (plot.y_label, plot.x_label)))
    baseline = "" if plot.baseline is None else f", baseline {short(plot.baseline)}"
    return f"{plot.title} ({axes}{baseline})"


def numbers(plot: Plot) -> Table:
    """One row per x, one column per series."""
    columns = [Column(plot.x_label), *(Column(series.label or plot.y_label) for series in plot.series)]
    found = [points(series, len(plot.x)) for series in plot.series]
    rows = [[short(x), *(with_interval(*one[row]) for one in found)] for row, x in enumerate(plot.x)]
    return Table(columns, rows)
