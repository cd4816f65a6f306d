"""Batch size and context length together, where a bench measured each with each (`grid`): up to where does speculation pay?

A table per task and temperature, and a plot per configuration: its speedup over the batch size, a line for each context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.lab.bench.bench_result import BenchResult, Cell, Speedup
from outrider.report.bench_plots import MAX_CELLS, compared, main_cells, speedups_of
from outrider.report.document import Block, Column, Heading, Plot, Table

HELP = "speedup, as in the table of speeds; ?: its interval holds 1, or there is none, so neither gain nor loss is sure"


@dataclass(frozen=True)
class Grid:
    """The cells of a task at a temperature."""

    where: str
    cells: Sequence[Cell]

    @property
    def sizes(self) -> list[int]:
        """Batch sizes, rising."""
        return sorted({cell.batch_size for cell in self.cells})

    @property
    def contexts(self) -> list[int | None]:
        """Prompts as they are first, then rising."""
        return sorted({cell.context for cell in self.cells}, key=lambda context: context or 0)

    def at(self, size: int, context: int | None) -> Cell | None:
        return next((cell for cell in self.cells if (cell.batch_size, cell.context) == (size, context)), None)


def grids(result: BenchResult) -> Iterator[Block]:
    """All of them under a heading; nothing where contexts were measured at one batch size only."""
    found = list(_found(result))
    if not found:
        return
    yield Heading("Batch size and context length together")
    for one in found:
        yield _table(result, one)
    for one in found[:MAX_CELLS]:
        yield from _plots(result, one)


def _found(result: BenchResult) -> Iterator[Grid]:
    for first in main_cells(result):
        alike = [cell for cell in result.cells if (cell.task, cell.temperature) == (first.task, first.temperature)]
        if len({cell.batch_size for cell in alike if cell.context is not None}) > 1:
            yield Grid(f"{first.task}, T = {first.temperature:g}", alike)


def _table(result: BenchResult, grid: Grid) -> Table:
    columns = [Column("configuration", "left"), Column("rows at once")]
    columns += [Column(_name(context), help="" if index else HELP) for index, context in enumerate(grid.contexts)]
    rows = []
    for number in compared(grid.cells):
        label = result.configurations[number].label
        for size in grid.sizes:
            cells = [grid.at(size, context) for context in grid.contexts]
            rows.append([label, str(size), *(_text(cell, number) for cell in cells)])
            label = ""
    return Table(columns, rows, f"Speedup by batch size and context: {grid.where}")


def _plots(result: BenchResult, grid: Grid) -> Iterator[Plot]:
    for number in compared(grid.cells):
        lines = [
            speedups_of(number, [grid.at(size, context) for size in grid.sizes], _name(context)) for context in grid.contexts
        ]
        title = f"Speedup of {result.configurations[number].label} by batch size and context: {grid.where}"
        yield Plot(title, "rows at once", "speedup", grid.sizes, lines, baseline=1.0, log_x=True)


def _name(context: int | None) -> str:
    return "prompts as they are" if context is None else f"context {context}"


def _text(cell: Cell | None, number: int) -> str:
    found: Speedup | None = one.speedup if cell and (one := cell.measured(number)) else None
    if found is None:
        return "-"
    return f"{found.value:.2f}x{'' if found.is_gain or found.is_loss else '?'}"
