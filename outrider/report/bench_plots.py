"""The plots of a bench report: speedup over batch size and over context, and acceptance by position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from outrider.lab.bench.bench_result import BenchResult, Cell, DepthAcceptance, Measured
from outrider.report.document import Block, Heading, Plot, Series

MAX_CELLS = 4  # whose acceptance is plotted; the tables have all
ENOUGH = 5  # steps that reached a position: fewer say nothing about it


def plots(result: BenchResult) -> Iterator[Block]:
    """All of them, under a heading; none where there is nothing to show."""
    found = [*_curves(result), *_by_cell(result)]
    if found:
        yield Heading("Curves")
        yield from found


def _curves(result: BenchResult) -> Iterator[Plot]:
    """One for each task and temperature."""
    for first in main_cells(result):
        alike = [cell for cell in result.cells if (cell.task, cell.temperature) == (first.task, first.temperature)]
        by_batch = [cell for cell in alike if cell.context is None]
        by_context = [cell for cell in alike if cell.context is not None and cell.batch_size == first.batch_size]
        where = f"{first.task}, T = {first.temperature:g}"
        if len(by_batch) > 1:
            sizes = [cell.batch_size for cell in by_batch]
            yield _speedups(result, by_batch, f"Speedup by batch size: {where}", "rows at once", sizes)
        if len(by_context) > 1:
            lengths = [cell.context or 0 for cell in by_context]
            yield _speedups(result, by_context, f"Speedup by context length: {where}", "tokens in the prompt", lengths)


def _speedups(result: BenchResult, cells: Sequence[Cell], title: str, x_label: str, x: Sequence[int]) -> Plot:
    order = sorted(range(len(cells)), key=lambda index: x[index])
    ordered = [cells[index] for index in order]
    series = [speedups_of(number, ordered, result.configurations[number].label) for number in compared(cells)]
    return Plot(title, x_label, "speedup", [x[index] for index in order], series, baseline=1.0, log_x=True)


def speedups_of(number: int, cells: Sequence[Cell | None], label: str) -> Series:
    """Speedups of one configuration, a point for each cell; a gap where there is no such cell, or it could not run there."""
    found = [cell.measured(number) if cell else None for cell in cells]
    speedups = [one.speedup if one else None for one in found]
    intervals = [one.interval if one else None for one in speedups]
    return Series(
        label, [one.value if one else None for one in speedups],
        [one.low if one else None for one in intervals], [one.high if one else None for one in intervals],
    )  # fmt: skip


def _by_cell(result: BenchResult) -> Iterator[Plot]:
    for cell in main_cells(result)[:MAX_CELLS]:
        wanted: list[tuple[str, str, Callable[[DepthAcceptance], Sequence[float | None]]]] = [
            ("Conditional acceptance", "P(kept | all before it kept)", lambda found: found.conditional),
            ("Survival", "P(this many draft tokens kept)", lambda found: found.survival),
        ]
        drafting = [one for one in cell.configurations if one.acceptance is not None and one.acceptance.reached]
        if any(max(one.acceptance.reached) >= ENOUGH for one in drafting if one.acceptance):
            deepest = max(sum(n >= ENOUGH for n in one.acceptance.reached) for one in drafting if one.acceptance)
            for title, y_label, read in wanted:
                lines = [_padded(result, one, read, deepest) for one in drafting]
                yield Plot(f"{title}: {cell.label}", "draft position", y_label, list(range(1, deepest + 1)), lines)


def _padded(
    result: BenchResult, one: Measured, read: Callable[[DepthAcceptance], Sequence[float | None]], length: int
) -> Series:
    """Values of the positions that enough steps reached."""
    found = one.acceptance
    values = [] if found is None else [v for v, n in zip(read(found), found.reached, strict=True) if n >= ENOUGH]
    return Series(result.configurations[one.configuration].label, [*values, *[None] * (length - len(values))])


def compared(cells: Sequence[Cell]) -> list[int]:
    """Configurations with a speedup in some of the cells."""
    return sorted({one.configuration for cell in cells for one in cell.configurations if one.speedup})


def main_cells(result: BenchResult) -> list[Cell]:
    """The first cell of every task and temperature: prompts as they are, the first batch size."""
    found: dict[tuple[str, float], Cell] = {}
    for cell in result.cells:
        found.setdefault((cell.task, cell.temperature), cell)
    return list(found.values())
