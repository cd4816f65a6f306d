"""A plot as an SVG image, drawn by matplotlib: lines with bands, and the baseline as a dashed line.

Series differ by marker and dash too, never by colour alone. Nothing of pyplot's global state is
touched; equal plots give equal bytes. On a dark page style sheets invert the image.
"""

from __future__ import annotations

import base64
import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

from outrider.extras import check_lab
from outrider.lazy import matplotlib
from outrider.report.document import Column, Plot, Series, Table
from outrider.report.text import one_line

Point = tuple[float | None, float | None, float | None]  # value, low, high


def finite(values: Sequence[float | None] | None, count: int) -> list[float | None]:
    """`count` values; None where there is no value, or no drawable one."""
    all_values = list(values) if values is not None else [None] * count
    if len(all_values) != count:
        raise ValueError(f"{len(all_values)} values over {count} of x")
    return [
        None if value is None or not math.isfinite(value) else float(value) for value in all_values
    ]


def short(value: float | None) -> str:
    """For a tick of an axis: three significant digits, no more than needed: 0.0123, 1.5, 48, 1234,
    1.2e-05."""
    text = figure(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def figure(value: float | None) -> str:
    """For a measured value: three significant digits, whole from 100 on: 0.0123, 1.50, 48.0, 1234.
    A dash where there is none."""
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
    columns = [
        Column(plot.x_label),
        *(Column(series.label or plot.y_label) for series in plot.series),
    ]
    found = [points(series, len(plot.x)) for series in plot.series]
    rows = [
        [short(x), *(with_interval(*column[row]) for column in found)]
        for row, x in enumerate(plot.x)
    ]
    return Table(columns, rows)


# of the picture, in points: text of 12 is then 10 px high on a phone of 390 px, 12 to 16 on a
# screen
WIDTH = 420
INK = "#1f2328"
FAINT = "#8a8f98"
COLOURS = ("#0b6bcb", "#c2410c", "#15803d", "#9333ea", "#b4860b", "#0e7490", "#be185d", "#57534e")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# what lies under a dashed line can be seen
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.5)), (0, (7, 2, 1.5, 2)))
# letters before a name wraps
LEGEND_WIDTH = 52
BESIDE_WIDTH = 34
SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "outrider", "text.parse_math": False, "font.size": 12,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.labelsize": 12,
    "grid.color": FAINT, "grid.linewidth": 0.5, "grid.alpha": 0.5, "axes.grid": True, "axes.axisbelow": True,
    "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 5,
    "axes.prop_cycle": f"cycler('color', ['{INK}'])",
}  # fmt: skip


def to_image(plot: Plot) -> str:
    """The picture as a URL that holds it, for an <img> element.

    Raises ValueError where a series has another length than x, or a logarithmic axis has values at
    or below 0.
    """
    return f"data:image/svg+xml;base64,{base64.b64encode(to_svg(plot).encode()).decode()}"


def to_svg(plot: Plot) -> str:
    """The SVG document. Raises ValueError as `to_image`, MissingExtraError without matplotlib."""
    check_lab("a plot")
    drawn = [points(series, len(plot.x)) for series in plot.series]
    is_empty = all(value is None for line in drawn for value, _, _ in line)
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # letters that matplotlib's font lacks: the browser's has them
        warnings.simplefilter("ignore", UserWarning)
        size = WIDTH / 72, (48 if is_empty else _height(plot)) / 72
        canvas = matplotlib.figure.Figure(figsize=size, layout="constrained", facecolor="none")
        axes: Any = canvas.add_subplot(facecolor="none")
        if is_empty:
            axes.set_axis_off()
            axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
        else:
            lines = [_draw_line(axes, plot.x, line, number) for number, line in enumerate(drawn)]
            _explain(canvas, axes, plot, lines)
        file = io.StringIO()
        canvas.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _height(plot: Plot) -> float:
    """Room for the legend, too."""
    names = [_legend_name(series) for series in plot.series]
    return 250 + (18 * sum(len(name.split("\n")) for name in names) if len(names) > 1 else 0)


def _draw_line(axes: Any, xs: Sequence[float], line: Sequence[Point], number: int) -> Any:
    """A series of a single point is a mark: large, without a line."""
    ys, lows, highs = (
        [math.nan if value is None else value for value in column]
        for column in zip(*line, strict=True)
    )
    colour = COLOURS[number % len(COLOURS)]
    marker = MARKERS[number % len(MARKERS)]
    look: dict[str, Any] = {"linestyle": DASHES[number % len(DASHES)]}
    if sum(value is not None for value, _, _ in line) == 1:
        look = {"linestyle": "none", "markersize": 9, "zorder": 5}
    axes.fill_between(xs, lows, highs, color=colour, alpha=0.16, linewidth=0)
    return axes.plot(xs, ys, color=colour, marker=marker, **look)[0]


def _explain(canvas: Any, axes: Any, plot: Plot, lines: Sequence[Any]) -> None:
    """The baseline, both axes, and a legend where there is a choice: a series a line, since names
    are whole configurations."""
    if plot.baseline is not None:
        axes.axhline(plot.baseline, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    axes.set_xlabel(textwrap.fill(one_line(plot.x_label), LEGEND_WIDTH))
    axes.set_ylabel(textwrap.fill(one_line(plot.y_label), BESIDE_WIDTH))
    _set_ticks(axes, plot)
    if len(lines) > 1:
        canvas.legend(
            lines,
            [_legend_name(series) for series in plot.series],
            loc="outside upper left",
            labelspacing=0.25,
            borderaxespad=0.1,
            handlelength=2.4,
        )


def _set_ticks(axes: Any, plot: Plot) -> None:
    """A logarithmic axis has a tick at each x value."""
    if plot.log_x:
        if min(plot.x) <= 0:
            raise ValueError(
                f"a logarithmic axis cannot show {short(min(plot.x))} ('{plot.title}')"
            )
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(plot.x))
    elif all(x == int(x) for x in plot.x):
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: short(x)))


def _legend_name(series: Series) -> str:
    name = textwrap.fill(one_line(series.label), LEGEND_WIDTH)
    return "\u200b" + name if name.startswith("_") else name  # matplotlib leaves names with _ out
