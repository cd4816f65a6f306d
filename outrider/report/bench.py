"""The report of a bench run: what to do, in a sentence and a chart; then tables and curves; then how
it was measured."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.errors import counted
from outrider.lab.bench.bench_result import (
    ENDINGS,
    BenchResult,
    Cell,
    Identity,
    TargetInfo,
)
from outrider.lab.intervals import WORTH
from outrider.report import server
from outrider.report.bench_tables import (
    Row,
    by_size,
    chart,
    condition,
    conditions,
    fastest,
    rows_of,
    tables,
)
from outrider.report.document import Block, Bullets, Document, Heading, Paragraph, Tone
from outrider.report.next_step import PROMPTS, command, step
from outrider.report.render import disturbed, how_fast, origin
from outrider.report.text import amount, interval

FEW = 8  # prompts; below, an interval is rough


def document(result: BenchResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = []
    if result.cells:
        blocks += [*_answer(result), *tables(result), *by_size(result)]
    if result.servers:
        blocks += server.blocks(result.servers)
    blocks += [Heading("How it was measured"), Bullets(list(_circumstances(result)))]
    return Document(_title(result), _subtitle(result), tuple(blocks))


def brief(result: BenchResult) -> Document:
    """The answer alone: what `outrider demo` shows."""
    return Document(_title(result), _subtitle(result), tuple(_answer(result)))


def _answer(result: BenchResult) -> Iterator[Block]:
    yield from _verdict(result)
    yield chart(result)
    yield from disturbed(cell.others for cell in result.cells)
    yield from _identity(result)
    yield from _failures(result)
    yield from _next(result)


def advice(result: BenchResult, cell: Cell) -> tuple[str, Tone]:
    """The advice for one condition, in a sentence, and its tone."""
    where = condition(cell)
    rows = rows_of(result, cell)
    best = fastest(rows)
    if best is None:
        return f"Nothing was compared with plain decoding on {where}.", "caution"
    row, speedup = best
    if speedup.value < WORTH and speedup.low <= 1:
        text = f"Do not speculate on {where}: the fastest setting, {row.label}, reaches "
        return f"{text}{interval(speedup, 'x')} the speed of plain decoding.", "bad"
    num_prompts = len(cell.prompt_ids)
    text = f"{row.label} on {where}: {how_fast(speedup, num_prompts)}."
    if not speedup.is_known:
        return f"{text} One prompt, or one batch, says nothing about others: measure more.", (
            "caution"
        )
    if speedup.low <= 1:
        return f"{text} It may be no gain: the interval reaches below 1.", "caution"
    rough = " With so few prompts the interval is rough." if num_prompts < FEW else ""
    slow = [other.label for other in rows if other.speedup and other.speedup.high < 1]
    slower = f" Slower than plain decoding: {', '.join(slow)}." if slow else ""
    return f"Use {text}{rough}{slower}", "good"


def _verdict(result: BenchResult) -> Iterator[Block]:
    """The advice; then that for each condition, where there are several."""
    advised = [advice(result, cell) for cell in result.cells]
    if len(advised) == 1:
        yield Paragraph(*advised[0])
        return
    best = [fastest(rows_of(result, cell)) for cell in result.cells]
    gains = [pair for pair, (_, tone) in zip(best, advised, strict=True) if pair and tone == "good"]
    labels = {row.label for row, _ in gains}
    if gains:
        speedups = [speedup.value for _, speedup in gains]
        what = f"Use {labels.pop()}" if len(labels) == 1 else "Use the best setting of each"
        times = " to ".join(sorted({f"{min(speedups):.2f}", f"{max(speedups):.2f}"}))
        yield Paragraph(
            f"{what}: {times} times as fast as plain decoding in {len(gains)} of {len(advised)} "
            "conditions, by 95 % intervals above 1.",
            "good",
        )
    elif all(tone == "bad" for _, tone in advised):
        yield Paragraph("Do not speculate: no setting is faster in any condition.", "bad")
    else:
        yield Paragraph("No setting is surely faster: measure more prompts.", "caution")
    yield Bullets([text for text, _ in advised])


def _identity(result: BenchResult) -> Iterator[Block]:
    """Whether greedy texts are the plain ones."""
    checked = [
        (row, row.measured.identity)
        for cell in result.cells
        for row in rows_of(result, cell)
        if row.measured.identity
    ]
    parted = [(row, same) for row, same in checked if same.num_identical < same.num_compared]
    compared = sum(same.num_compared for _, same in checked)
    if not parted:
        if checked:
            yield Paragraph(
                f"The output is unchanged: all {counted(compared, 'text')} are plain decoding's, "
                "token by token."
            )
        return
    differing = sum(same.num_compared - same.num_identical for _, same in parted)
    promised = any(row.info.lossless and row.info.exact for row, _ in parted)
    why = "" if promised else " None was promised to the bit (rounding, lossy verifiers, prefill)."
    yield Paragraph(
        f"The output changed: {differing} of {compared} texts differ from plain decoding's.{why} "
        "'outrider certify' looks for the cause.",
        "bad" if promised else "caution",
    )
    yield Bullets([_parting(row, same) for row, same in parted])


def _parting(row: Row, same: Identity) -> str:
    where = (
        f"{row.label} on {condition(row.cell)}: {same.num_compared - same.num_identical} of "
        f"{same.num_compared} differ"
    )
    if (first := same.first) is None:
        return where
    return (
        f"{where}; prompt {first.prompt}, from output token {first.position}: plain "
        f"{first.plain_text!r} {first.plain[:3]}, here {first.own_text!r} {first.own[:3]}"
    )


def _failures(result: BenchResult) -> Iterator[Block]:
    missing = [f"{info.label}: {info.failure}" for info in result.configurations if info.failure]
    for cell in result.cells:
        missing += [f"{label} on {condition(cell)}: {why}" for label, why in cell.failures.items()]
    if missing:
        yield Paragraph("Not measured:", "caution")
        yield Bullets(missing)


def _next(result: BenchResult) -> list[Block]:
    """Serve what is best in the first condition that gains; otherwise look for something better."""
    if result.target is None:
        return []
    target = result.target.name
    for cell in conditions(result):
        best = fastest(rows_of(result, cell))
        if best is not None and advice(result, cell)[1] == "good":
            drafter = ["--drafter", best[0].label]
            return step("Serve with it:", command(result, "serve", target, drafter))
    tune = command(result, "tune", target, also=PROMPTS)
    return step("Try more drafters and lengths on these prompts:", tune)


def _circumstances(result: BenchResult) -> Iterator[str]:
    """Everything that a reader needs to repeat it, and to doubt it."""
    skipped = result.workload.num_skipped_lines
    yield f"prompts: {result.workload.name}" + (f", {skipped} bad lines skipped" if skipped else "")
    yield from result.workload.notes
    for cell in result.cells:
        num_runs = max((measured.num_runs for measured in cell.configurations), default=0)
        yield (
            f"{condition(cell)}: {counted(len(cell.prompt_ids), 'prompt')}, "
            f"{counted(cell.rounds, 'round')}, {counted(num_runs, 'run')} of each setting; ended "
            f"by: {ENDINGS[cell.ended_by]}"
        )
    if learners := [info.label for info in result.configurations if info.learns]:
        yield (
            f"{', '.join(learners)}: drafts depend on earlier texts or on the clock, so each "
            "condition and round is a fresh start, in which no prompt comes twice"
        )
    if result.target is not None:
        yield _memory(result.target)
    for info in result.configurations:
        yield from (f"{info.label}: {note}" for note in info.notes)
    yield from result.notes
    if result.command:
        yield f"command: {result.command}"


def _memory(target: TargetInfo) -> str:
    """The bytes that plain decoding has to read, and how fast it could be at best."""
    weights = "unknown" if target.weights_bytes is None else amount(target.weights_bytes)
    cache = amount(target.kv_bytes_per_token)
    size = f"target: {weights} of weights, {cache} of KV cache per token"
    if target.pass_bytes is None or target.bandwidth_bytes_per_s is None:
        return size
    bandwidth = target.bandwidth_bytes_per_s
    return (
        f"{size}; at the measured memory bandwidth of {bandwidth / 1e9:.1f} GB/s, reading "
        f"{amount(target.pass_bytes)} of weights per token limits plain decoding to about "
        f"{bandwidth / target.pass_bytes:.0f} tokens/s, unless a cache holds them"
    )


def _title(result: BenchResult) -> str:
    if result.target is None:
        return "Bench: " + " against ".join(server.label for server in reversed(result.servers))
    draft = f" with draft {result.target.draft}" if result.target.draft else ""
    return f"Bench: {result.target.name}{draft}"


def _subtitle(result: BenchResult) -> str:
    if (target := result.target) is None:
        return origin(result)
    rounded = f" rounded to {target.quantise} bits on loading" if target.quantise else ""
    return origin(
        result,
        f"{target.dtype}{rounded} on {target.device}, {counted(target.threads, 'thread')}",
        f"{target.runtime} runtime",
        f"{result.seconds / 60:.1f} minutes of measuring",
    )
