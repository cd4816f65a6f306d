"""Plots in a terminal: bars of blocks with their numbers, or for lines a row per series: its shape, and values at a few places.

Shapes of one plot share one scale, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from outrider.report.clean import one_line
from outrider.report.document import Plot
from outrider.report.plotted import aligned, places, points, short, with_interval

BAR_WIDTH = 30  # columns
MIN_PLACES, MAX_PLACES = 4, 24  # columns of values for a line
NAME_WIDTH, VALUE_WIDTH = 44, 6  # columns that a name with its shape, and a value, take
MAX_SHAPE = 32  # letters of a shape
EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"
COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")


def plot_parts(plot: Plot, *, width: int, ascii_only: bool) -> Iterator[RenderableType]:
    """For a terminal of `width` columns. Raises ValueError where a series has another length than x."""
    axes = f"{plot.y_label} over {plot.x_label}" if plot.x_label and plot.y_label else plot.y_label or plot.x_label
    yield Text.assemble(("\n" + one_line(plot.title), "bold"), f" ({one_line(axes)})" if axes else "")
    table = RichTable(box=None, padding=(0, 2, 0, 0))
    if plot.kind == "bar":
        _add_bars(table, plot, ascii_only)
    else:
        _add_lines(table, plot, width, ascii_only)
    yield table
    if plot.kind == "bar" and plot.baseline is not None:
        yield Text(f"{'|' if ascii_only else '┊'} = {short(plot.baseline)}", "dim")


def _add_bars(table: RichTable, plot: Plot, ascii_only: bool) -> None:
    table.show_header = False
    several = len(plot.series) > 1
    for _ in range(2 if several else 1):
        table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    found = [points(series, len(plot.x)) for series in plot.series]
    top = max([value for one in found for value, _, _ in one if value is not None] + [plot.baseline or 0.0, 0.0])
    notch = None if plot.baseline is None or top <= 0 else min(BAR_WIDTH - 1, int(plot.baseline / top * BAR_WIDTH))
    for row, place in enumerate(places(plot)):
        for number, (series, one) in enumerate(zip(plot.series, found, strict=True)):
            share = (one[row][0] or 0.0) / top if top > 0 else 0.0
            cells = [Text(one_line(place) if number == 0 else "")]
            cells += [Text(one_line(series.label))] if several else []
            bar = _bar(share, notch, ascii_only)
            table.add_row(*cells, Text(bar, COLOURS[number % len(COLOURS)]), Text(with_interval(*one[row])))


def _bar(share: float, notch: int | None, ascii_only: bool) -> str:
    """Blocks, an eighth of a letter fine; `notch`: where the baseline crosses."""
    eighths = round(max(0.0, share) * BAR_WIDTH * 8)
    blocks = "#" * round(eighths / 8) if ascii_only else "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
    if notch is None:
        return blocks
    letters = list(blocks.ljust(notch + 1))
    letters[notch] = "|" if ascii_only else "┊"
    return "".join(letters)


def _add_lines(table: RichTable, plot: Plot, width: int, ascii_only: bool) -> None:
    chosen = _spread(len(plot.x), max(MIN_PLACES, min(MAX_PLACES, (width - NAME_WIDTH) // VALUE_WIDTH)))
    table.add_column(Text(one_line(plot.x_label)), overflow="fold")
    if not ascii_only:
        table.add_column("", no_wrap=True)
    for place in chosen:
        table.add_column(Text(one_line(places(plot)[place])), justify="right", no_wrap=True)
    found = [[value for value, _, _ in points(series, len(plot.x))] for series in plot.series]
    everything = [value for one in found for value in one if value is not None]
    for number, (series, ys) in enumerate(zip(plot.series, found, strict=True)):
        shape = [Text(_shape(ys, everything), COLOURS[number % len(COLOURS)])] if not ascii_only else []
        written = aligned(ys)
        cells = [Text(written[place]) for place in chosen]
        table.add_row(Text(one_line(series.label or plot.y_label)), *shape, *cells)


def _shape(ys: Sequence[float | None], everything: Sequence[float]) -> str:
    if not everything:
        return ""
    low, high = min(everything), max(everything)
    taken = [ys[place] for place in _spread(len(ys), MAX_SHAPE)]
    return "".join(" " if y is None else LEVELS[round((y - low) / (high - low or 1.0) * (len(LEVELS) - 1))] for y in taken)


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]
