"""A plot as an SVG image, drawn by matplotlib: lines with bands, or bars with error bars, and the baseline as a dashed line.

Series differ by marker, dash or hatch too, never by colour alone. Words as x make horizontal bars, whose long names wrap on the
left. Nothing of pyplot's global state is touched; equal plots give equal bytes. On a dark page style sheets invert the image.
"""

from __future__ import annotations

import base64
import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from outrider.report.clean import clean, one_line
from outrider.report.document import Plot, Series
from outrider.report.plotted import finite, has_words, points, short, x_words

WIDTH = 420  # of the picture, in points: text of 12 is then 10 px high on a phone of 390 px, 12 to 16 on a screen
INK, FAINT, PAPER = "#1f2328", "#8a8f98", "#ffffff"
COLOURS = ("#0b6bcb", "#c2410c", "#15803d", "#9333ea", "#b4860b", "#0e7490", "#be185d", "#57534e")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.5)), (0, (7, 2, 1.5, 2)))  # what lies under a dashed line can be seen
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo", "---")
NAME_WIDTH, LEGEND_WIDTH = 20, 52  # letters before a name wraps
SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "outrider", "text.parse_math": False, "font.size": 12,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.labelsize": 12,
    "grid.color": FAINT, "grid.linewidth": 0.5, "grid.alpha": 0.5, "axes.grid": True, "axes.axisbelow": True,
    "legend.frameon": False, "hatch.linewidth": 0.8, "lines.linewidth": 1.8, "lines.markersize": 5,
    "axes.prop_cycle": cycler(color=[INK]),
}  # fmt: skip


def to_image(plot: Plot) -> str:
    """The picture as a URL that holds it, for an <img> element.

    Raises ValueError where a series has another length than x, or a logarithmic axis has values at or below 0.
    """
    return f"data:image/svg+xml;base64,{base64.b64encode(to_svg(plot).encode()).decode()}"


def to_svg(plot: Plot) -> str:
    """The SVG document. Raises ValueError as `to_image`."""
    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that matplotlib's font lacks: the browser's has them
        canvas = Figure(figsize=(WIDTH / 72, _height(plot) / 72), layout="constrained", facecolor="none")
        axes: Any = canvas.add_subplot(facecolor="none")
        if _is_empty(plot):
            _draw_nothing(axes)
        elif plot.kind == "bar":
            _draw_bars(axes, plot, lying=has_words(plot))
        else:
            _draw_lines(axes, plot)
        if not _is_empty(plot):
            _draw_legend(canvas, plot)
        file = io.StringIO()
        canvas.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _is_empty(plot: Plot) -> bool:
    return not any(value is not None for series in plot.series for value in finite(series.y, len(plot.x)))


def _height(plot: Plot) -> float:
    """Room for the bars, if they lie, and for the legend."""
    if _is_empty(plot):
        return 48
    legend = 18 * sum(len(_legend_name(series).split("\n")) for series in plot.series) if len(plot.series) > 1 else 0
    if plot.kind == "bar" and has_words(plot):
        lines = sum(max(len(_name(x).split("\n")) * 15, 16 * len(plot.series)) + 12 for x in x_words(plot))
        return 60 + lines + legend
    return 250 + legend


def _draw_nothing(axes: Any) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)


def _draw_lines(axes: Any, plot: Plot) -> None:
    xs = list(range(len(plot.x))) if has_words(plot) else finite(plot.x, len(plot.x))  # type: ignore[arg-type]
    for number, series in enumerate(plot.series):
        ys, lows, highs = (_gaps(column) for column in zip(*points(series, len(plot.x)), strict=True))
        style = _line_style(plot, number)
        axes.fill_between(_gaps(xs), lows, highs, color=style["color"], alpha=0.16, linewidth=0)
        axes.plot(_gaps(xs), ys, **style)
    if plot.baseline is not None:
        axes.axhline(plot.baseline, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    _label(axes, plot.x_label, plot.y_label)
    _set_ticks(axes, plot)


def _line_style(plot: Plot, number: int) -> dict[str, Any]:
    """A series of a single point is a mark: large, without a line."""
    style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
    if sum(value is not None for value in finite(plot.series[number].y, len(plot.x))) == 1:
        return style | {"linestyle": "none", "markersize": 9, "zorder": 5}
    return style | {"linestyle": DASHES[number % len(DASHES)]}


def _draw_bars(axes: Any, plot: Plot, *, lying: bool) -> None:
    """One group per x. Lying bars run from the top down, their values written at the end."""
    thick = 0.8 / max(1, len(plot.series))
    draw, line = (axes.barh, axes.axvline) if lying else (axes.bar, axes.axhline)
    for number, series in enumerate(plot.series):
        for row, (value, low, high) in enumerate(points(series, len(plot.x))):
            if value is None:
                continue
            middle = row + (number - (len(plot.series) - 1) / 2) * thick
            draw(middle, value, thick * 0.92, **_bar_style(number))
            ends = [[max(0.0, value - (value if low is None else low))], [max(0.0, (value if high is None else high) - value)]]
            if low is not None or high is not None:
                axes.errorbar(
                    value if lying else middle, middle if lying else value, **{"xerr" if lying else "yerr": ends},
                    fmt="none", ecolor=INK, elinewidth=1.1, capsize=min(4, 10 * thick),
                )  # fmt: skip
            if lying:
                end = max(value + ends[1][0], value, 0)
                axes.annotate(
                    short(value), (end, middle), xytext=(6, 0), textcoords="offset points", va="center", fontsize=11,
                    bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.75},
                )  # fmt: skip
    if plot.baseline is not None:
        line(plot.baseline, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    if lying:
        axes.margins(x=0.12)
        axes.set_ylim(len(plot.x) - 0.5, -0.5)
        axes.set_yticks(range(len(plot.x)), [_name(x) for x in x_words(plot)])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        _label(axes, plot.y_label, "")
    else:
        _label(axes, plot.x_label, plot.y_label)
        axes.grid(visible=False, axis="x")
        axes.set_xlim(-0.6, len(plot.x) - 0.4)
        step = math.ceil(len(plot.x) / 14)
        axes.set_xticks(range(0, len(plot.x), step), x_words(plot)[::step])


def _bar_style(number: int) -> dict[str, Any]:
    look = {"color": COLOURS[number % len(COLOURS)], "hatch": HATCHES[number % len(HATCHES)], "alpha": 0.85}
    return {**look, "edgecolor": "none" if number == 0 else INK, "linewidth": 0}


def _label(axes: Any, below: str, beside: str) -> None:
    axes.set_xlabel(textwrap.fill(one_line(below), LEGEND_WIDTH))
    axes.set_ylabel(textwrap.fill(one_line(beside), 34))


def _set_ticks(axes: Any, plot: Plot) -> None:
    """Ticks at the x values themselves where they are few."""
    if has_words(plot):
        axes.set_xticks(range(len(plot.x)), [textwrap.fill(_name(x), 12) for x in x_words(plot)])
        return
    xs = sorted({x for x in finite(plot.x, len(plot.x)) if x is not None})  # type: ignore[arg-type]
    if plot.log_x:
        if xs and xs[0] <= 0:
            raise ValueError(f"a logarithmic axis cannot show {short(xs[0])} ('{plot.title}')")
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    if len(xs) > 1:
        axes.set_xlim(_beyond(xs, log=plot.log_x))
    if len(xs) <= 12 and (plot.log_x or _even(xs)):
        axes.xaxis.set_major_locator(FixedLocator(xs))
    elif all(x == int(x) for x in xs) and not plot.log_x:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))


def _beyond(xs: Sequence[float], *, log: bool) -> tuple[float, float]:
    """A little more than all x values, those without a value too."""
    if log:
        edge = (xs[-1] / xs[0]) ** 0.05
        return xs[0] / edge, xs[-1] * edge
    edge = 0.05 * (xs[-1] - xs[0])
    return xs[0] - edge, xs[-1] + edge


def _even(xs: Sequence[float]) -> bool:
    """Whether labels at every x value keep clear of one another."""
    gaps = [after - before for before, after in pairwise(xs)]
    return not gaps or min(gaps) > 0.06 * (xs[-1] - xs[0])


def _draw_legend(canvas: Figure, plot: Plot) -> None:
    """One series a line, above the plot: names are whole configurations."""
    if len(plot.series) < 2:
        return
    axes = canvas.axes[0]
    handles: list[Any] = []
    for number in range(len(plot.series)):
        if plot.kind == "bar":
            handles += axes.bar([math.nan], [math.nan], **_bar_style(number)).patches
        else:
            handles += axes.plot([], [], **_line_style(plot, number))
    canvas.legend(
        handles, [_legend_name(series) for series in plot.series], loc="outside upper left",
        labelspacing=0.25, borderaxespad=0.1, handlelength=2.4,
    )  # fmt: skip


def _legend_name(series: Series) -> str:
    name = textwrap.fill(one_line(series.label), LEGEND_WIDTH)
    return "\u200b" + name if name.startswith("_") else name  # matplotlib leaves names with _ out


def _name(x: str) -> str:
    return textwrap.fill(one_line(clean(x)), NAME_WIDTH) or "-"


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
