"""The report of a bench run: what pays where, in sentences; then tables and plots; then how it was
measured."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.errors import counted
from outrider.lab.bench.bench_result import (
    ENDINGS,
    BenchResult,
    Cell,
    Identity,
    Measured,
    TargetInfo,
)
from outrider.lab.intervals import WORTH
from outrider.report import server
from outrider.report.bench_tables import main_cells, plots, speed_text, speeds, tables
from outrider.report.document import Block, Bullets, Document, Heading, Paragraph, Tone
from outrider.report.render import disturbed, origin


def document(result: BenchResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = []
    if result.cells:
        blocks += [
            *_verdicts(result),
            *_other_cells(result),
            *_disturbed(result),
            *_identity(result),
            *_failures(result),
        ]
        blocks += [*tables(result), *plots(result)]
    if result.servers:
        blocks += server.blocks(result.servers)
    blocks += [Heading("How it was measured"), Bullets(list(_circumstances(result)))]
    return Document(_title(result), _subtitle(result), tuple(blocks))


def brief(result: BenchResult) -> Document:
    """The verdicts and one table: what `outrider demo` shows."""
    blocks = [
        *_verdicts(result),
        *_disturbed(result),
        *_identity(result),
        *_failures(result),
        speeds(result),
    ]
    return Document(_title(result), _subtitle(result), tuple(blocks))


def best(result: BenchResult, cell: Cell) -> Measured | None:
    """The lossless configuration with the largest speedup; None where none was measured."""
    able = [
        configuration
        for configuration in cell.configurations
        if configuration.speedup and result.configurations[configuration.configuration].lossless
    ]
    return max(able, key=lambda one: one.speedup.value if one.speedup else 0.0, default=None)


def advice(result: BenchResult, cell: Cell) -> tuple[str, Tone]:
    """Advice for a cell, in one sentence, and its tone."""
    first = best(result, cell)
    if first is None or first.speedup is None:
        return f"{cell.label}: nothing was compared with plain decoding", "caution"
    name = result.configurations[first.configuration].label
    speedup = first.speedup
    fastest = f"{name}: {speed_text(speedup)}"
    if speedup.value < WORTH and speedup.low <= 1:
        return f"do not speculate on {cell.label}: the fastest is {fastest}", "bad"
    if not speedup.is_known:
        return (
            f"{fastest} on {cell.label}: one prompt, or one batch of them, says nothing about others",
            "caution",
        )
    if speedup.low <= 1:
        return (
            f"{fastest} on {cell.label}, which may be no gain: the interval reaches below 1",
            "caution",
        )
    return f"{fastest} on {cell.label}{_lost(result, cell)}", "good"


def _verdicts(result: BenchResult) -> Iterator[Block]:
    """Verdicts on the main cells: prompts as they are, the first batch size."""
    for cell in main_cells(result):
        yield Paragraph(*advice(result, cell))


def _other_cells(result: BenchResult) -> Iterator[Block]:
    main = main_cells(result)
    if others := [advice(result, cell)[0] for cell in result.cells if cell not in main]:
        yield Bullets(others)


def _disturbed(result: BenchResult) -> list[Block]:
    return disturbed({cell.label: cell.others for cell in result.cells})


def _lost(result: BenchResult, cell: Cell) -> str:
    """The configurations that are surely slower than plain decoding in a cell."""
    slow = [
        configuration.configuration
        for configuration in cell.configurations
        if configuration.speedup and configuration.speedup.high < 1
    ]
    losers = [result.configurations[number].label for number in slow]
    return f" (slower than plain: {', '.join(losers)})" if losers else ""


def _identity(result: BenchResult) -> Iterator[Block]:
    """Whether greedy texts are the plain ones."""
    checked = [
        (cell, configuration, configuration.identity)
        for cell in result.cells
        for configuration in cell.configurations
        if configuration.identity
    ]
    parted = [
        (cell, one, identity)
        for cell, one, identity in checked
        if identity.num_identical < identity.num_compared
    ]
    compared = sum(identity.num_compared for *_, identity in checked)
    if not parted:
        if checked:
            yield Paragraph(
                f"All {counted(compared, 'text')} that must be the plain ones are, token by token.",
                "good",
            )
        return
    differing = sum(identity.num_compared - identity.num_identical for *_, identity in parted)
    promised = any(_promised(result, one) for _, one, _ in parted)
    why = (
        ""
        if promised
        else " None of them was promised to the bit: see the notes on rounding and lossy verifiers."
    )
    yield Paragraph(
        f"{differing} of {compared} texts that should be the plain ones differ.{why} `outrider "
        "certify` looks for the cause.",
        "bad" if promised else "caution",
    )
    yield Bullets([_parting(result, cell, one, identity) for cell, one, identity in parted])


def _promised(result: BenchResult, one: Measured) -> bool:
    info = result.configurations[one.configuration]
    return info.lossless and info.exact


def _parting(result: BenchResult, cell: Cell, one: Measured, identity: Identity) -> str:
    count = f"{identity.num_compared - identity.num_identical} of {identity.num_compared}"
    where = f"{cell.label}, {result.configurations[one.configuration].label}: {count} differ"
    if (first := identity.first) is None:
        return where
    return (
        f"{where}; prompt {first.prompt}, from output token {first.position}: plain {first.plain_text!r} {first.plain[:3]}, "
        f"here {first.own_text!r} {first.own[:3]}"
    )


def _failures(result: BenchResult) -> Iterator[Block]:
    missing = [f"{info.label}: {info.failure}" for info in result.configurations if info.failure]
    missing += [
        f"{cell.label}, {label}: {why}"
        for cell in result.cells
        for label, why in cell.failures.items()
    ]
    if missing:
        yield Paragraph("Some configurations could not run:", "caution")
        yield Bullets(missing)


def _circumstances(result: BenchResult) -> Iterator[str]:
    """Everything that a reader needs to repeat it, and to doubt it."""
    skipped = (
        f", {result.workload.num_skipped_lines} bad lines skipped"
        if result.workload.num_skipped_lines
        else ""
    )
    yield f"workload {result.workload.name}{skipped}"
    yield from result.workload.notes
    for cell in result.cells:
        num_runs = max((configuration.num_runs for configuration in cell.configurations), default=0)
        yield (
            f"{cell.label}: {counted(len(cell.prompt_ids), 'prompt')}, "
            f"{counted(cell.rounds, 'round')}, {counted(num_runs, 'run')} each; ended by: "
            f"{ENDINGS[cell.ended_by]}"
        )
    if learners := [info.label for info in result.configurations if info.learns]:
        yield (
            f"{', '.join(learners)}: what is drafted depends on earlier texts or on the clock, so every cell and round is a "
            "fresh start, in which no prompt comes twice"
        )
    for info in result.configurations:
        yield from (f"{info.label}: {note}" for note in info.notes)
    yield from result.notes
    if result.command:
        yield f"command: {result.command}"


def _title(result: BenchResult) -> str:
    if result.target is None:
        return "Bench: " + " against ".join(server.label for server in reversed(result.servers))
    return f"Bench: {result.target.name}" + (
        f" with draft {result.target.draft}" if result.target.draft else ""
    )


def _subtitle(result: BenchResult) -> str:
    if (target := result.target) is None:
        return origin(result)
    return origin(
        result,
        f"{_numbers(target)} on {target.device}, {counted(target.threads, 'thread')}",
        f"{target.runtime} runtime",
        f"{result.seconds / 60:.1f} minutes of measuring",
    )


def _numbers(target: TargetInfo) -> str:
    """The format of the target's weights."""
    return (
        target.dtype
        if target.quantise is None
        else f"{target.dtype}, rounded to {target.quantise} bits on loading,"
    )
