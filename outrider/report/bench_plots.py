"""What a bench report says over batch sizes and contexts, alone and each with each, and over draft positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.lab.bench.bench_result import BenchResult, Cell
from outrider.report.document import Block, Column, Heading, Plot, Series, Table, curves

MAX_CELLS = 4  # whose acceptance is plotted; the tables have all
ENOUGH = 5  # steps that reached a position: fewer say nothing about it
GRID = "speedup, as in the table of speeds; ?: its interval holds 1, or there is none, so neither gain nor loss is sure"


def main_cells(result: BenchResult) -> list[Cell]:
    """The first cell of every task and temperature: prompts as they are, the first batch size."""
    found: dict[tuple[str, float], Cell] = {}
    for cell in result.cells:
        found.setdefault((cell.task, cell.temperature), cell)
    return list(found.values())


def grids(result: BenchResult) -> Iterator[Block]:
    """A table for each task and temperature; nothing where contexts were measured at one batch size only."""
    for first in main_cells(result):
        cells = _alike(result, first)
        if len({cell.batch_size for cell in cells if cell.context is not None}) > 1:
            yield _grid(result, cells, f"Speedup by batch size and context: {_where(first)}")


def _grid(result: BenchResult, cells: Sequence[Cell], title: str) -> Table:
    by_place = {(cell.batch_size, cell.context): cell for cell in cells}
    contexts = sorted({cell.context for cell in cells}, key=lambda context: context or 0)
    columns = [Column("configuration", "left"), Column("rows at once")]
    for index, context in enumerate(contexts):
        name = "prompts as they are" if context is None else f"context {context}"
        columns.append(Column(name, help="" if index else GRID))
    rows = []
    for number in _compared(cells):
        label = result.configurations[number].label
        for size in sorted({cell.batch_size for cell in cells}):
            rows.append([label, str(size), *(_speedup(by_place.get((size, context)), number) for context in contexts)])
            label = ""
    return Table(columns, rows, title)


def _speedup(cell: Cell | None, number: int) -> str:
    one = cell.measured(number) if cell else None
    if one is None or one.speedup is None:
        return "-"
    return f"{one.speedup.value:.2f}x{'?' if one.speedup.low <= 1 <= one.speedup.high else ''}"


def plots(result: BenchResult) -> Iterator[Block]:
    """Every plot, under a heading; none where there is nothing to show."""
    found = [*_curves(result), *_survival(result)]
    if found:
        yield Heading("Curves")
        yield from found


def _curves(result: BenchResult) -> Iterator[Plot]:
    """Speedups over batch sizes and over context lengths, for each task and temperature."""
    for first in main_cells(result):
        by_batch = [cell for cell in _alike(result, first) if cell.context is None]
        by_context = [cell for cell in _alike(result, first) if cell.context and cell.batch_size == first.batch_size]
        if len(by_batch) > 1:
            by_batch.sort(key=lambda cell: cell.batch_size)
            sizes = [cell.batch_size for cell in by_batch]
            yield _speedups(result, by_batch, f"Speedup by batch size: {_where(first)}", "rows at once", sizes)
        if len(by_context) > 1:
            by_context.sort(key=lambda cell: cell.context or 0)
            lengths = [cell.context or 0 for cell in by_context]
            yield _speedups(result, by_context, f"Speedup by context length: {_where(first)}", "tokens in the prompt", lengths)


def _alike(result: BenchResult, first: Cell) -> list[Cell]:
    return [cell for cell in result.cells if (cell.task, cell.temperature) == (first.task, first.temperature)]


def _where(cell: Cell) -> str:
    return f"{cell.task}, T = {cell.temperature:g}"


def _compared(cells: Sequence[Cell]) -> list[int]:
    """Configurations with a speedup in some of the cells."""
    return sorted({one.configuration for cell in cells for one in cell.configurations if one.speedup})


def _speedups(result: BenchResult, cells: Sequence[Cell], title: str, x_label: str, x: Sequence[int]) -> Plot:
    """A line for each configuration; a gap where it could not run."""
    series = []
    for number in _compared(cells):
        found = [cell.measured(number) for cell in cells]
        speedups = [one.speedup if one else None for one in found]
        intervals = [one if one and one.is_known else None for one in speedups]
        values = [one.value if one else None for one in speedups]
        lows, highs = [one.low if one else None for one in intervals], [one.high if one else None for one in intervals]
        series.append(Series(result.configurations[number].label, values, lows, highs))
    return Plot(title, x_label, "speedup", x, series, baseline=1.0, log_x=True)


def _survival(result: BenchResult) -> Iterator[Plot]:
    """How far drafts are kept, over the positions that enough steps reached."""
    for cell in main_cells(result)[:MAX_CELLS]:
        lines = {}
        for one in cell.configurations:
            if one.acceptance is not None and (count := sum(n >= ENOUGH for n in one.acceptance.reached)):
                lines[result.configurations[one.configuration].label] = dict(enumerate(one.acceptance.survival[:count], 1))
        if lines:
            yield curves(f"Survival: {cell.label}", "draft position", "P(this many draft tokens kept)", lines)
