"""The charts and the tables of a bench report. A condition is a cell of the result: a task, a
temperature, a batch size, a context length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.lab.bench.bench_result import (
    BenchResult,
    Cell,
    ConfigurationInfo,
    Measured,
    Percentiles,
    TurnMeasured,
)
from outrider.lab.result import Interval
from outrider.report.document import NOTHING, Bar, Block, Cells, Chart, Heading, table
from outrider.report.render import SPEEDUP, plain_bar, speedup_bar
from outrider.report.text import amount, by_part, interval, number

POSITIONS = 5  # of acceptance in the table
PHASES = ("prompt", "draft", "target", "verify", "other")


def condition(cell: Cell) -> str:
    """'reasoning (greedy)', 'chat (temperature 1, batch of 4, 2048 tokens of context)'."""
    words = [f"temperature {cell.temperature:g}" if cell.temperature else "greedy"]
    words += [f"batch of {cell.batch_size}"] if cell.batch_size > 1 else []
    words += [] if cell.context is None else [f"{cell.context} tokens of context"]
    return f"{cell.task} ({', '.join(words)})"


def conditions(result: BenchResult) -> list[Cell]:
    """The first cell of every task and temperature: prompts as they are, the first batch size."""
    firsts: dict[tuple[str, float], Cell] = {}
    for cell in result.cells:
        firsts.setdefault((cell.task, cell.temperature), cell)
    return list(firsts.values())


@dataclass(frozen=True)
class Row:
    """One setting under one condition."""

    cell: Cell
    info: ConfigurationInfo
    measured: Measured
    is_best: bool  # the fastest of the condition, and surely a gain

    @property
    def speedup(self) -> Interval | None:
        return self.measured.speedup

    @property
    def label(self) -> str:
        """'none' is how plain decoding is asked for, and no name for a reader."""
        name, *options = self.info.label.split(" ", 1)
        return " ".join(["plain decoding" if name == "none" else name, *options])


def rows_of(result: BenchResult, cell: Cell) -> list[Row]:
    """Every setting that was measured under a condition."""
    speedups = [measured.speedup for measured in cell.configurations if measured.speedup]
    best = max(speedups, key=lambda speedup: speedup.value, default=None)
    return [
        Row(
            cell,
            result.configurations[measured.configuration],
            measured,
            best is not None and best.low > 1 and measured.speedup is best,
        )
        for measured in cell.configurations
    ]


def fastest(rows: Sequence[Row]) -> tuple[Row, Interval] | None:
    """The lossless setting with the largest speedup; None where none was measured."""
    able = [(row, row.speedup) for row in rows if row.speedup and row.info.lossless]
    return max(able, key=lambda pair: pair[1].value, default=None)


# ---------------------------------------------------------------- charts


def chart(result: BenchResult) -> Chart:
    """The speedup of every setting, the fastest first, plain decoding among them."""
    groups = {condition(cell): _bars(result, cell) for cell in conditions(result)}
    return Chart(SPEEDUP, "setting", "speedup", groups, baseline=1.0)


def _bars(result: BenchResult, cell: Cell) -> list[Bar]:
    bars = []
    for row in rows_of(result, cell):
        if row.speedup is not None:
            bars.append(speedup_bar(row.label, row.speedup, is_best=row.is_best))
        elif row.info.baseline == row.measured.configuration:
            bars.append(plain_bar(row.label))
    return sorted(bars, key=lambda bar: -bar.value)


def by_size(result: BenchResult) -> Iterator[Block]:
    """Speedups over batch sizes and context lengths; none where there is one of each."""
    charts = []
    for first in conditions(result):
        alike = [
            cell
            for cell in result.cells
            if (cell.task, cell.temperature) == (first.task, first.temperature)
        ]
        by_batch = {cell.batch_size: cell for cell in alike if cell.context is None}
        by_context = {cell.context: cell for cell in alike if cell.context is not None}
        for what, cells in (("batch size", by_batch), ("tokens of context", by_context)):
            if len(cells) > 1:
                title = f"Speedup by {what}: {condition(first)}"
                groups = _bars_by_size(result, cells)
                charts.append(Chart(title, what, "speedup", groups, baseline=1.0))
    if charts:
        yield Heading("By batch size and context length")
        yield from charts


def _bars_by_size(result: BenchResult, cells: Mapping[int, Cell]) -> dict[str, list[Bar]]:
    """The bars of each setting; none where it could not run."""
    groups: dict[str, list[Bar]] = {}
    for index, info in enumerate(result.configurations):
        for size in sorted(cells):
            measured = cells[size].measured(index)
            if measured is not None and measured.speedup is not None:
                bar = speedup_bar(str(size), measured.speedup)
                groups.setdefault(info.label, []).append(bar)
    return groups


# ---------------------------------------------------------------- tables


def _same(row: Row) -> str:
    identity = row.measured.identity
    if identity is None:
        return NOTHING
    texts = f"{identity.num_identical} of {identity.num_compared}"
    equal = identity.equal_tokens
    return texts if equal is None else f"{texts}, {equal:.1f} tokens"


def _correct(row: Row) -> str:
    accuracy = row.measured.accuracy
    if accuracy is None or not accuracy.num_graded:
        return NOTHING
    share = f"{accuracy.num_right} of {accuracy.num_graded}"
    if row.speedup is None:
        return share
    p_value = "" if accuracy.p_value is None else f", p {accuracy.p_value:.2f}"
    return f"{share} (plain {accuracy.num_plain_right}{p_value})"


def _positions(row: Row) -> str:
    acceptance = row.measured.acceptance
    shares = acceptance.conditional if acceptance is not None else []
    more = " ..." if len(shares) > POSITIONS else ""
    return " ".join(number(share) for share in shares[:POSITIONS]) + more


def _parts(row: Row) -> str:
    return by_part(row.measured.parts) or NOTHING


def _milliseconds(percentiles: Percentiles | None, *names: str) -> str:
    if percentiles is None:
        return NOTHING
    return " / ".join(f"{1000 * getattr(percentiles, name):.1f}" for name in names)


def _other_cpu(row: Row) -> str:
    share = row.measured.other_cpu
    return NOTHING if share is None or not row.measured.num_disturbed else f"{share:.0%}"


def _memory(row: Row) -> str:
    weights = row.info.added_weights_bytes
    cache = row.info.added_kv_bytes_per_token
    parts = [amount(weights)] if weights else []
    parts += [f"{amount(cache)}/token"] if cache else []
    return " + ".join(parts) or NOTHING


def _phase(name: str) -> Callable[[Row], str]:
    def share(row: Row) -> str:
        times = row.measured.time_s
        return f"{100 * times.get(name, 0.0) / (sum(times.values()) or 1.0):.0f}"

    return share


def _length(row: Row, name: str) -> str:
    lengths = row.measured.acceptance_lengths
    return NOTHING if lengths is None else number(getattr(lengths, name))


def _histogram_of(row: Row) -> str:
    """The share of the steps that emitted 1, 2, 3 ... tokens."""
    steps = row.measured.tokens_per_step
    if not steps:
        return NOTHING
    total = sum(steps.values())
    shares = [
        f"{count}: {100 * num_steps / total:.0f} %" for count, num_steps in sorted(steps.items())
    ]
    return ", ".join(shares[:POSITIONS]) + (" ..." if len(shares) > POSITIONS else "")


SPEED: Cells[Row] = {
    "setting": lambda row: row.label,
    "speedup": lambda row: interval(row.speedup, "x"),
    "tokens/s": lambda row: number(row.measured.tokens_per_s, 1),
    "end to end": lambda row: number(row.measured.end_to_end, unit="x"),
    "tokens per pass": lambda row: number(row.measured.tau),
    "accepted": lambda row: number(row.measured.alpha),
    "unchanged texts": _same,
    "correct answers": _correct,
    "CPU used by others": _other_cpu,
}
DRAFTS: Cells[Row] = {
    "setting": lambda row: row.label,
    "drafted per step": lambda row: number(row.measured.drafted / row.measured.num_steps, 1),
    "accepted of drafted": lambda row: number(row.measured.draft_utilisation),
    "accepted by position": _positions,
    "accepted by part": _parts,
    "added memory": _memory,
}
LENGTHS: Cells[Row] = {
    "setting": lambda row: row.label,
    "mean of requests": lambda row: _length(row, "mean_of_requests"),
    "weighted by tokens": lambda row: _length(row, "by_tokens"),
    "pooled": lambda row: _length(row, "pooled"),
    "steps by tokens": _histogram_of,
}
LATENCY: Cells[Row] = {
    "setting": lambda row: row.label,
    "TTFT": lambda row: _milliseconds(row.measured.ttft_s, "p50"),
    "TPOT": lambda row: _milliseconds(row.measured.tpot_s, "p50", "p99"),
    "wait": lambda row: _milliseconds(row.measured.chunk_s, "p50", "p99"),
    "throughput": lambda row: number(row.measured.throughput_tokens_per_s, 1),
    **{f"{name} %": _phase(name) for name in PHASES},
}


@dataclass(frozen=True)
class TurnRow:
    """One turn of the conversations, in one setting."""

    row: Row
    turn: TurnMeasured


TURNS: Cells[TurnRow] = {
    "setting": lambda row: row.row.label,
    "turn": lambda row: str(row.turn.turn),
    "prompts": lambda row: str(row.turn.num_runs),
    "prompt tokens": lambda row: number(row.turn.mean_prompt_tokens, 0),
    "speedup": lambda row: interval(row.turn.speedup, "x"),
    "tokens/s": lambda row: number(row.turn.tokens_per_s, 1),
    "tokens per pass": lambda row: number(row.turn.tau),
}


def _turns_of(rows: Sequence[Row]) -> Iterator[TurnRow]:
    for row in rows:
        for turn in row.measured.by_turn:
            yield TurnRow(row, turn)


def tables(result: BenchResult) -> Iterator[Block]:
    """Speed, drafts, and where time goes."""
    groups = {condition(cell): rows_of(result, cell) for cell in result.cells}
    yield table(groups, SPEED, "Speed", _is_best)
    drafting = {name: list(filter(_drafts, rows)) for name, rows in groups.items()}
    drafting = {name: rows for name, rows in drafting.items() if rows}
    if drafting:
        yield table(drafting, DRAFTS, "Drafts", _is_best)
    lengths = {name: list(filter(_has_lengths, rows)) for name, rows in drafting.items()}
    lengths = {name: rows for name, rows in lengths.items() if rows}
    if lengths:
        yield table(lengths, LENGTHS, "Acceptance length, as others quote it", _is_best)
    turns = {name: list(_turns_of(rows)) for name, rows in groups.items()}
    turns = {name: rows for name, rows in turns.items() if rows}
    if turns:
        yield table(turns, TURNS, "By turn of a conversation")
    yield table(groups, LATENCY, "Latency in ms, and where time goes", _is_best)


def _is_best(row: Row) -> bool:
    return row.is_best


def _has_lengths(row: Row) -> bool:
    return row.measured.acceptance_lengths is not None


def _drafts(row: Row) -> bool:
    return row.measured.acceptance is not None
