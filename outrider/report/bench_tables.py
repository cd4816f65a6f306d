"""The tables and plots of a bench report: columns with what each says of a configuration in a cell,
rows, and lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from outrider.lab.bench.bench_result import BenchResult, Cell, Measured, Percentiles, TargetInfo
from outrider.lab.result import Interval
from outrider.report.document import (
    Block,
    Column,
    Fact,
    Heading,
    Paragraph,
    Plot,
    Series,
    Table,
    curves,
    table,
)
from outrider.report.text import amount, interval, number

POSITIONS = 5  # of acceptance in the table; the plot has all
MAX_CELLS = 4  # whose survival is plotted; the tables have all
ENOUGH = 5  # steps that reached a position: fewer say nothing about it


def speed_text(found: Interval | None) -> str:
    """1.92x [1.80, 2.04]."""
    return interval(found, "x") + ("" if found is None or found.is_known else " (no interval)")


def _same(result: Measured) -> str:
    return (
        f"{result.identity.num_identical} of {result.identity.num_compared}"
        if result.identity
        else "-"
    )


def _right(result: Measured) -> str:
    accuracy = result.accuracy
    if accuracy is None or not accuracy.num_graded:
        return "-"
    p_value = "" if accuracy.p_value is None else f", p {accuracy.p_value:.2f}"
    return (
        f"{accuracy.num_right} of {accuracy.num_graded} (plain {accuracy.num_plain_right}{p_value})"
    )


def _positions(shares: Sequence[float | None]) -> str:
    return " ".join(number(share) for share in shares[:POSITIONS]) + (
        " ..." if len(shares) > POSITIONS else ""
    )


def _milliseconds(percentiles: Percentiles | None, *names: str) -> str:
    return (
        "-"
        if percentiles is None
        else " / ".join(f"{1000 * getattr(percentiles, name):.1f}" for name in names)
    )


SPEED: tuple[Fact[Measured], ...] = (
    Fact(
        "speedup", lambda one: speed_text(one.speedup),
        "plain seconds / own seconds of the decode phase, after the first step, over the same "
        "tokens: sums over prompts, each the mean of its rounds; 95 % bootstrap over prompts",
    ),
    Fact(
        "end to end", lambda one: f"{one.end_to_end.value:.2f}x" if one.end_to_end else "-",
        "the same with prompt and queue: from the start to the last common token",
    ),
    Fact(
        "tokens/s", lambda one: number(one.tokens_per_s.value if one.tokens_per_s else None, 1),
        "of one row's decode phase: tokens / seconds, both after its first step",
    ),
    Fact("τ", lambda one: number(one.tau), "tokens per target pass, correction or bonus token included: emitted / steps"),
    Fact("α", lambda one: number(one.alpha), "accepted / tested draft tokens"),
    Fact("same text", _same, "greedy texts that are plain decoding's, token by token, of all runs; -: sampled, or plain"),
    Fact(
        "right", _right,
        "answers of the first round that are right, of those that were complete on both sides; "
        "plain decoding's on the same prompts, and McNemar's exact p where the sides differ",
    ),
)  # fmt: skip
OTHERS: Fact[Measured] = Fact(
    "others",
    lambda one: "-" if one.other_cpu is None else f"{one.other_cpu:.0%}",
    "mean share of the processors that other processes used during its runs",
)
DRAFTS: tuple[Fact[Measured], ...] = (
    Fact("utilisation", lambda one: number(one.draft_utilisation), "accepted / drafted (vLLM calls this the acceptance rate)"),
    Fact("drafted", lambda one: number(one.drafted / one.num_steps, 1), "draft tokens per step"),
    Fact(
        "conditional", lambda one: _positions(one.acceptance.conditional if one.acceptance else ()),
        "P(the i-th draft token is kept | those before it were); on a tree: some token of that "
        "depth", "left",
    ),
    Fact(
        "kept", lambda one: _positions(one.acceptance.per_position if one.acceptance else ()),
        "steps that kept an i-th draft token / steps that had a draft (what vLLM prints)", "left",
    ),
)  # fmt: skip
LATENCY: tuple[Fact[Measured], ...] = (
    Fact(
        "TTFT", lambda one: _milliseconds(one.ttft_s, "p50"),
        "ms from the start to the first step's tokens, the prompt included; p50 over runs",
    ),
    Fact(
        "TPOT", lambda one: _milliseconds(one.tpot_s, "p50", "p99"),
        "ms per output token after the first step, per run; p50 / p99 over runs",
    ),
    Fact(
        "chunk", lambda one: _milliseconds(one.chunk_s, "p50", "p99"),
        "ms from one step of a row to its next, how long a reader waits for more text; p50 / p99 "
        "over all",
    ),
    Fact(
        "all rows", lambda one: number(one.throughput_tokens_per_s, 1),
        "tokens/s of everything: all rows, prompts included",
    ),
    Fact(
        "of the roof", lambda one: "-" if one.roof is None else f"{one.roof:.0%}",
        "a row's tokens/s / those of a plain decoder that reads its weights and keys at the full "
        "measured bandwidth",
    ),
)  # fmt: skip
PHASES = {
    "prompt": "reading the prompt into the target",
    "draft": "drafting; reading the prompt into a draft model",
    "target": "target passes over pending token and draft",
    "verify": "distributions, verdicts, appending",
    "other": "caches, and what lies between steps",
}


def tables(result: BenchResult) -> Iterator[Block]:
    """Every table of a bench report; those without a row are left out."""
    yield speeds(result)
    drafts = _table(result, DRAFTS, "Drafts", lambda one: one.acceptance is not None)
    if drafts.rows:
        yield drafts
    yield Heading("Latency and time")
    yield _table(result, LATENCY, "Latency, ms")
    yield _table(
        result, [_phase(name) for name in PHASES], "Where the time goes, share of the wall time"
    )
    yield from _memory(result)


def speeds(result: BenchResult) -> Table:
    """The main table of a bench result. The fastest of a cell stands out, where it is surely a
    gain."""
    every = [
        (configuration, cell) for cell in result.cells for configuration in cell.configurations
    ]
    is_disturbed = any(series.num_disturbed for series, _ in every)
    marked = frozenset(
        index for index, (series, cell) in enumerate(every) if _is_best(series, cell)
    )
    return replace(
        _table(result, [*SPEED, OTHERS] if is_disturbed else SPEED, "Speed"), marked=marked
    )


def _phase(name: str) -> Fact[Measured]:
    return Fact(
        name, lambda one: f"{one.time_s[name] / sum(one.time_s.values()):.0%}", PHASES[name]
    )


def _memory(result: BenchResult) -> Iterator[Block]:
    target = result.target
    if target is None:
        return
    yield Heading("Memory")
    yield table(
        result.configurations,
        [
            Fact("configuration", lambda info: info.label, align="left"),
            Fact(
                "weights",
                lambda info: _amount(info.added_weights_bytes),
                "alongside the target's, one copy; -: the drafter does not say",
            ),
            Fact(
                "of the target's",
                lambda info: _share(info.added_weights_bytes, target.weights_bytes),
            ),
            Fact(
                "KV per token",
                lambda info: _amount(info.added_kv_bytes_per_token),
                "alongside the target's; tables of model-free drafters are not counted",
            ),
        ],
        "What drafting adds",
    )
    yield Paragraph(_roof(target))


def _amount(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else amount(num_bytes)


def _share(part: int | None, whole: int | None) -> str:
    return f"{part / whole:.1%}" if part is not None and whole else "-"


def _roof(target: TargetInfo) -> str:
    weights = "unknown" if target.weights_bytes is None else amount(target.weights_bytes)
    has = f"The target has {weights} of weights and {amount(target.kv_bytes_per_token)} of keys and values per token."
    if target.pass_bytes is None or target.bandwidth_bytes_per_s is None:
        return f"{has} What a pass reads is not known, so there is no roof to compare with."
    seconds = target.pass_bytes / target.bandwidth_bytes_per_s
    rate = f"{target.bandwidth_bytes_per_s / 1e9:.1f} GB/s"
    return (
        f"{has} A pass reads {amount(target.pass_bytes)} of weights, and memory gives {rate} (measured): at best "
        f"{1 / seconds:.0f} tokens/s without speculation, keys and values not counted. Caches that hold a small model lift it."
    )


def _table(
    result: BenchResult,
    facts: Sequence[Fact[Measured]],
    title: str,
    wanted: Callable[[Measured], bool] = lambda one: True,
) -> Table:
    """A cell's name stands in its first row only."""
    rows: list[list[str]] = []
    for cell in result.cells:
        label = cell.label
        for one in filter(wanted, cell.configurations):
            rows.append(
                [
                    label,
                    result.configurations[one.configuration].label,
                    *(fact.cell(one) for fact in facts),
                ]
            )
            label = ""
    columns = [
        Column("cell", "left"),
        Column("configuration", "left"),
        *(fact.column for fact in facts),
    ]
    return Table(columns, rows, title)


def _is_best(result: Measured, cell: Cell) -> bool:
    speedups = [other.speedup.value for other in cell.configurations if other.speedup]
    return (
        result.speedup is not None
        and result.speedup.low > 1
        and result.speedup.value == max(speedups)
    )


# ---------------------------------------------------------------- plots


def main_cells(result: BenchResult) -> list[Cell]:
    """The first cell of every task and temperature: prompts as they are, the first batch size."""
    firsts: dict[tuple[str, float], Cell] = {}
    for cell in result.cells:
        firsts.setdefault((cell.task, cell.temperature), cell)
    return list(firsts.values())


def plots(result: BenchResult) -> Iterator[Block]:
    """Speedups over batch sizes and context lengths, and how far drafts survive; none where there
    is nothing to show."""
    lines: list[Block] = []
    for first in main_cells(result):
        alike = [
            cell
            for cell in result.cells
            if (cell.task, cell.temperature) == (first.task, first.temperature)
        ]
        where = f"{first.task}, T = {first.temperature:g}"
        by_batch = {cell.batch_size: cell for cell in alike if cell.context is None}
        by_context = {cell.context: cell for cell in alike if cell.context is not None}
        if len(by_batch) > 1:
            lines.append(
                _speedups(result, by_batch, f"Speedup by batch size: {where}", "rows at once")
            )
        if len(by_context) > 1:
            lines.append(
                _speedups(
                    result,
                    by_context,
                    f"Speedup by context length: {where}",
                    "tokens in the prompt",
                )
            )
    lines += _survival(result)
    if lines:
        yield Heading("Curves")
        yield from lines


def _speedups(result: BenchResult, cells: Mapping[int, Cell], title: str, x_label: str) -> Plot:
    """A line for each configuration; a gap where it could not run."""
    x = sorted(cells)
    series = []
    for index, info in enumerate(result.configurations):
        results = [cells[at].measured(index) for at in x]
        speedups = [one.speedup if one else None for one in results]
        if any(speedups):
            known = [speedup if speedup and speedup.is_known else None for speedup in speedups]
            values = [speedup.value if speedup else None for speedup in speedups]
            lows = [one.low if one else None for one in known]
            highs = [one.high if one else None for one in known]
            series.append(Series(info.label, values, lows, highs))
    return Plot(title, x_label, "speedup", x, series, baseline=1.0, log_x=True)


def _survival(result: BenchResult) -> Iterator[Plot]:
    """How far drafts are kept, over the positions that enough steps reached."""
    for cell in main_cells(result)[:MAX_CELLS]:
        lines = {}
        for configuration in cell.configurations:
            if configuration.acceptance is None:
                continue
            count = sum(steps >= ENOUGH for steps in configuration.acceptance.reached)
            if count:
                lines[result.configurations[configuration.configuration].label] = dict(
                    enumerate(configuration.acceptance.survival[:count], 1)
                )
        if lines:
            yield curves(
                f"Survival: {cell.label}", "draft position", "P(this many draft tokens kept)", lines
            )
