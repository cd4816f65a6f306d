"""The tables of a bench report. A cell's name stands in its first row only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from outrider.lab.bench.bench_result import Accuracy, BenchResult, Cell, Measured, Speedup
from outrider.lab.server.types import Percentiles
from outrider.report.document import Block, Column, Heading, Paragraph, Table
from outrider.report.text import amount, number

POSITIONS = 5  # of acceptance in the table; the plots have all
CELL, NAME = Column("cell", "left"), Column("configuration", "left")
Line = list[str]


def tables(result: BenchResult) -> Iterator[Block]:
    """All of them; those without a row are left out."""
    yield _speed(result)
    yield from _accepted(result)
    yield Heading("Latency and time")
    yield _latency(result)
    yield _time_split(result)
    yield from _accuracy(result)
    yield from _memory(result)


def speed_text(found: Speedup | None) -> str:
    """1.92x [1.80, 2.04]."""
    if found is None:
        return "-"
    interval = found.interval
    span = f" [{interval.low:.2f}, {interval.high:.2f}]" if interval else " (no interval)"
    return f"{found.value:.2f}x{span}"


def overview(result: BenchResult) -> Table:
    """One line for each configuration of each cell."""
    columns = [
        CELL, NAME, Column("tokens/s", help="of one row's decode phase, behind its first step"),
        Column("speedup", help="plain seconds / own seconds of the decode phase; 95 % bootstrap over prompts"),
        Column("τ", help="tokens per target pass, correction or bonus token included"),
        Column("α", help="accepted / tested draft tokens"),
        Column("same text", help="texts that are plain decoding's, token by token"),
        Column("right", help="answers of the first round that are right, of those that were complete on both sides"),
    ]  # fmt: skip

    def line(one: Measured, cell: Cell) -> Line:
        identity, accuracy = one.identity, one.accuracy
        return [
            number(one.tokens_per_s, 0), speed_text(one.speedup) if one.speedup else "1", number(one.tau), number(one.alpha),
            f"{identity.num_identical} of {identity.num_compared}" if identity else "-",
            f"{accuracy.num_right} of {accuracy.num_graded}" if accuracy else "-",
        ]  # fmt: skip

    return _table(result, columns, line, "", _winners(result))


def _speed(result: BenchResult) -> Table:
    columns = [
        CELL,
        NAME,
        Column(
            "speedup",
            help="plain seconds / own seconds of the decode phase, behind the first step, over the same tokens: sums over "
            "prompts, each the mean of its rounds; 95 % bootstrap over prompts",
        ),
        Column("end to end", help="the same with prompt and queue: from the start to the last common token"),
        Column("tokens/s", help="of one row's decode phase: tokens / seconds, both behind its first step"),
        Column("same text", help="greedy texts that are plain decoding's, token by token, of all runs; -: sampled, or plain"),
    ]
    disturbed = any(one.num_disturbed for cell in result.cells for one in cell.configurations)
    if disturbed:
        columns.append(Column("others", help="mean share of the processors that other processes used during its runs"))

    def line(one: Measured, cell: Cell) -> Line:
        identity = one.identity
        others = ["-" if one.other_cpu is None else f"{one.other_cpu:.0%}"] if disturbed else []
        return [
            speed_text(one.speedup) if one.speedup else ("1" if _is_plain(result, one) else "-"),
            f"{one.end_to_end.value:.2f}x" if one.end_to_end else "-",
            number(one.tokens_per_s, 1),
            f"{identity.num_identical} of {identity.num_compared}" if identity else "-",
            *others,
        ]

    return _table(result, columns, line, "Speed", _winners(result))


def _accepted(result: BenchResult) -> Iterator[Block]:
    columns = [
        CELL,
        NAME,
        Column("τ", help="tokens per target pass, correction or bonus token included: emitted / steps"),
        Column("α", help="accepted / tested draft tokens"),
        Column("utilisation", help="accepted / drafted (vLLM calls this the acceptance rate)"),
        Column("drafted", help="draft tokens per step"),
    ]

    def line(one: Measured, cell: Cell) -> Line | None:
        if one.acceptance is None:
            return None
        return [number(one.tau), number(one.alpha), number(one.draft_utilisation), number(one.drafted / one.num_steps, 1)]

    table = _table(result, columns, line, "Acceptance")
    if table.rows:
        yield table
        yield _by_position(result)


def _by_position(result: BenchResult) -> Table:
    columns = [
        CELL,
        NAME,
        Column(
            "conditional",
            "left",
            help="P(the i-th draft token is kept | those before it were); on a tree: some token of that depth",
        ),
        Column("kept", "left", help="steps that kept an i-th draft token / steps that had a draft (what vLLM prints)"),
    ]

    def line(one: Measured, cell: Cell) -> Line | None:
        found = one.acceptance
        return None if found is None else [_row(found.conditional), _row(found.per_position)]

    return _table(result, columns, line, f"Acceptance by position, 1 to {POSITIONS}")


def _row(shares: Sequence[float | None]) -> str:
    return " ".join(number(share) for share in shares[:POSITIONS]) + (" ..." if len(shares) > POSITIONS else "")


def _latency(result: BenchResult) -> Table:
    columns = [
        CELL,
        NAME,
        Column("TTFT", help="ms from the start to the first step's tokens, the prompt included; p50 over runs"),
        Column("TPOT", help="ms per output token behind the first step, per run; p50 / p99 over runs"),
        Column("chunk", help="ms from one step of a row to its next, how long a reader waits for more text; p50 / p99 over all"),
        Column("all rows", help="tokens/s of everything: all rows, prompts included"),
        Column(
            "of the roof",
            help="a row's tokens/s / those of a plain decoder that reads its weights and keys at the full measured bandwidth",
        ),
    ]

    def line(one: Measured, cell: Cell) -> Line:
        return [
            _milliseconds(one.ttft_s, "p50"), _milliseconds(one.tpot_s, "p50", "p99"), _milliseconds(one.chunk_s, "p50", "p99"),
            number(one.throughput_tokens_per_s, 1), "-" if one.roof is None else f"{one.roof:.0%}",
        ]  # fmt: skip

    return _table(result, columns, line, "Latency, ms")


def _time_split(result: BenchResult) -> Table:
    helps = {
        "prompt": "reading the prompt into the target",
        "draft": "drafting; reading the prompt into a draft model",
        "target": "target passes over pending token and draft",
        "verify": "distributions, verdicts, appending",
        "other": "caches, and what lies between steps",
    }
    columns = [CELL, NAME, *(Column(name, help=text) for name, text in helps.items())]

    def line(one: Measured, cell: Cell) -> Line:
        total = sum(one.time_s.values())
        return [f"{one.time_s[name] / total:.0%}" for name in helps]

    return _table(result, columns, line, "Where the time goes, share of the wall time")


def _accuracy(result: BenchResult) -> Iterator[Block]:
    columns = [
        CELL,
        NAME,
        Column("right", help="answers of the first round that are right, of those that were complete on both sides"),
        Column("plain"),
        Column("difference", help="right / graded, here - plain; 95 % interval for paired answers (Agresti & Min 2005)"),
        Column("p", help="McNemar's exact test on the prompts that only one side answered rightly; -: there are none"),
        Column("incomplete", help="prompts whose answer was cut off on either side (--max-tokens): not graded"),
    ]

    def line(one: Measured, cell: Cell) -> Line | None:
        found = one.accuracy
        if found is None or _is_plain(result, one):
            return None
        return [
            f"{found.num_right} of {found.num_graded}", f"{found.num_plain_right} of {found.num_graded}", _difference(found, one),
            number(found.p_value, 3), str(found.num_incomplete),
        ]  # fmt: skip

    table = _table(result, columns, line, "")
    if not table.rows:
        return
    yield Heading("Right answers")
    graded = [one.accuracy.num_graded for cell in result.cells for one in cell.configurations if one.accuracy]
    if any(graded):
        yield table
    else:
        remedy = "raise --max-tokens, leave --set ignore_eos=true out"
        yield Paragraph(f"No answer came to its end on both sides, so none was graded: {remedy}.", "caution")


def _difference(found: Accuracy, one: Measured) -> str:
    if found.difference is None:
        return "-"
    if one.identity and one.identity.num_identical == one.identity.num_compared:
        return "0: same texts"
    span = found.difference
    return f"{span.value:+.1%} [{span.low:+.1%}, {span.high:+.1%}]"


def _memory(result: BenchResult) -> Iterator[Block]:
    target = result.target
    if target is None:
        return
    columns = [
        NAME,
        Column("weights", help="beside the target's, one copy; -: the drafter does not say"),
        Column("of the target's"),
        Column("KV per token", help="beside the target's; tables of model-free drafters are not counted"),
    ]
    rows = []
    for info in result.configurations:
        weights, per_token = info.added_weights_bytes, info.added_kv_bytes_per_token
        share = weights / target.weights_bytes if weights is not None and target.weights_bytes else None
        sizes = ["-" if value is None else amount(value) for value in (weights, per_token)]
        rows.append([info.label, sizes[0], "-" if share is None else f"{share:.1%}", sizes[1]])
    yield Heading("Memory")
    yield Table(columns, rows, "What drafting adds")
    yield Paragraph(_roof(result))


def _roof(result: BenchResult) -> str:
    target = result.target
    assert target is not None
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
    result: BenchResult, columns: Sequence[Column], line: Callable[[Measured, Cell], Line | None], title: str,
    marked: Callable[[Measured, Cell], bool] = lambda one, cell: False,
) -> Table:  # fmt: skip
    rows: list[Line] = []
    marks: set[int] = set()
    for cell in result.cells:
        label = cell.label
        for one in cell.configurations:
            if (rest := line(one, cell)) is None:
                continue
            if marked(one, cell):
                marks.add(len(rows))
            rows.append([label, result.configurations[one.configuration].label, *rest])
            label = ""
    return Table(columns, rows, title, frozenset(marks))


def _winners(result: BenchResult) -> Callable[[Measured, Cell], bool]:
    """The fastest of each cell, where it is surely a gain."""

    def is_winner(one: Measured, cell: Cell) -> bool:
        speedups = [other.speedup.value for other in cell.configurations if other.speedup]
        return one.speedup is not None and one.speedup.is_gain and one.speedup.value == max(speedups)

    return is_winner


def _is_plain(result: BenchResult, one: Measured) -> bool:
    return result.configurations[one.configuration].baseline == one.configuration


def _milliseconds(found: Percentiles | None, *names: str) -> str:
    return "-" if found is None else " / ".join(f"{1000 * getattr(found, name):.1f}" for name in names)
