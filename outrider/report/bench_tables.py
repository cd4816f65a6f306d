"""The tables of a bench report: their columns, each with what it says of a configuration in a cell, and the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.lab.bench.bench_result import BenchResult, Cell, Measured, Speedup
from outrider.lab.server.types import Percentiles
from outrider.report.document import Block, Column, Heading, Paragraph, Table
from outrider.report.text import amount, number

POSITIONS = 5  # of acceptance in the table; the plot has all


def speed_text(found: Speedup | None) -> str:
    """1.92x [1.80, 2.04]."""
    if found is None:
        return "-"
    interval = found.interval
    span = f" [{interval.low:.2f}, {interval.high:.2f}]" if interval else " (no interval)"
    return f"{found.value:.2f}x{span}"


def _same(one: Measured) -> str:
    return f"{one.identity.num_identical} of {one.identity.num_compared}" if one.identity else "-"


def _right(one: Measured) -> str:
    return f"{one.accuracy.num_right} of {one.accuracy.num_graded}" if one.accuracy else "-"


def _difference(one: Measured) -> str:
    if one.accuracy is None or one.accuracy.difference is None:
        return "-"
    if one.identity and one.identity.num_identical == one.identity.num_compared:
        return "0: same texts"
    span = one.accuracy.difference
    return f"{span.value:+.1%} [{span.low:+.1%}, {span.high:+.1%}]"


def _positions(shares: Sequence[float | None]) -> str:
    return " ".join(number(share) for share in shares[:POSITIONS]) + (" ..." if len(shares) > POSITIONS else "")


def _milliseconds(found: Percentiles | None, *names: str) -> str:
    return "-" if found is None else " / ".join(f"{1000 * getattr(found, name):.1f}" for name in names)


@dataclass(frozen=True)
class Fact(Column):
    """A column, and what it says of one configuration in one cell."""

    cell: Callable[[Measured], str] = str


SPEED = (
    Fact(
        "speedup", cell=lambda one: speed_text(one.speedup),
        help="plain seconds / own seconds of the decode phase, behind the first step, over the same tokens: sums over prompts, "
        "each the mean of its rounds; 95 % bootstrap over prompts",
    ),
    Fact(
        "end to end", cell=lambda one: f"{one.end_to_end.value:.2f}x" if one.end_to_end else "-",
        help="the same with prompt and queue: from the start to the last common token",
    ),
    Fact(
        "tokens/s", cell=lambda one: number(one.tokens_per_s, 1),
        help="of one row's decode phase: tokens / seconds, both behind its first step",
    ),
    Fact(
        "τ", cell=lambda one: number(one.tau),
        help="tokens per target pass, correction or bonus token included: emitted / steps",
    ),
    Fact("α", cell=lambda one: number(one.alpha), help="accepted / tested draft tokens"),
    Fact(
        "same text", cell=_same,
        help="greedy texts that are plain decoding's, token by token, of all runs; -: sampled, or plain",
    ),
    Fact(
        "right", cell=_right,
        help="answers of the first round that are right, of those that were complete on both sides",
    ),
)  # fmt: skip
OTHERS = Fact(
    "others", cell=lambda one: "-" if one.other_cpu is None else f"{one.other_cpu:.0%}",
    help="mean share of the processors that other processes used during its runs",
)  # fmt: skip
DRAFTS = (
    Fact(
        "utilisation", cell=lambda one: number(one.draft_utilisation),
        help="accepted / drafted (vLLM calls this the acceptance rate)",
    ),
    Fact("drafted", cell=lambda one: number(one.drafted / one.num_steps, 1), help="draft tokens per step"),
    Fact(
        "conditional", "left", cell=lambda one: _positions(one.acceptance.conditional if one.acceptance else ()),
        help="P(the i-th draft token is kept | those before it were); on a tree: some token of that depth",
    ),
    Fact(
        "kept", "left", cell=lambda one: _positions(one.acceptance.per_position if one.acceptance else ()),
        help="steps that kept an i-th draft token / steps that had a draft (what vLLM prints)",
    ),
)  # fmt: skip
LATENCY = (
    Fact(
        "TTFT", cell=lambda one: _milliseconds(one.ttft_s, "p50"),
        help="ms from the start to the first step's tokens, the prompt included; p50 over runs",
    ),
    Fact(
        "TPOT", cell=lambda one: _milliseconds(one.tpot_s, "p50", "p99"),
        help="ms per output token behind the first step, per run; p50 / p99 over runs",
    ),
    Fact(
        "chunk", cell=lambda one: _milliseconds(one.chunk_s, "p50", "p99"),
        help="ms from one step of a row to its next, how long a reader waits for more text; p50 / p99 over all",
    ),
    Fact(
        "all rows", cell=lambda one: number(one.throughput_tokens_per_s, 1),
        help="tokens/s of everything: all rows, prompts included",
    ),
    Fact(
        "of the roof", cell=lambda one: "-" if one.roof is None else f"{one.roof:.0%}",
        help="a row's tokens/s / those of a plain decoder that reads its weights and keys at the full measured bandwidth",
    ),
)  # fmt: skip
PHASES = {
    "prompt": "reading the prompt into the target",
    "draft": "drafting; reading the prompt into a draft model",
    "target": "target passes over pending token and draft",
    "verify": "distributions, verdicts, appending",
    "other": "caches, and what lies between steps",
}
ANSWERS = (
    Fact("right", cell=_right),
    Fact("plain", cell=lambda one: f"{one.accuracy.num_plain_right} of {one.accuracy.num_graded}" if one.accuracy else "-"),
    Fact(
        "difference", cell=_difference,
        help="right / graded, here - plain; 95 % interval for paired answers (Agresti & Min 2005)",
    ),
    Fact(
        "p", cell=lambda one: number(one.accuracy.p_value if one.accuracy else None, 3),
        help="McNemar's exact test on the prompts that only one side answered rightly; -: there are none",
    ),
    Fact(
        "incomplete", cell=lambda one: str(one.accuracy.num_incomplete) if one.accuracy else "-",
        help="prompts whose answer was cut off on either side (--max-tokens): not graded",
    ),
)  # fmt: skip


def tables(result: BenchResult) -> Iterator[Block]:
    """All of them; those without a row are left out."""
    yield speeds(result)
    drafts = _table(result, DRAFTS, "Drafts", lambda one: one.acceptance is not None)
    if drafts.rows:
        yield drafts
    yield Heading("Latency and time")
    yield _table(result, LATENCY, "Latency, ms")
    yield _table(result, [_phase(name) for name in PHASES], "Where the time goes, share of the wall time")
    yield from _answers(result)
    yield from _memory(result)


def speeds(result: BenchResult) -> Table:
    """What a bench is made for. The fastest of a cell stands out, where it is surely a gain."""
    every = [(one, cell) for cell in result.cells for one in cell.configurations]
    is_disturbed = any(one.num_disturbed for one, _ in every)
    marked = frozenset(index for index, (one, cell) in enumerate(every) if _is_best(one, cell))
    return replace(_table(result, [*SPEED, OTHERS] if is_disturbed else SPEED, "Speed"), marked=marked)


def _phase(name: str) -> Fact:
    return Fact(name, help=PHASES[name], cell=lambda one: f"{one.time_s[name] / sum(one.time_s.values()):.0%}")


def _answers(result: BenchResult) -> Iterator[Block]:
    graded = [one.accuracy.num_graded for cell in result.cells for one in cell.configurations if one.accuracy]
    if not graded:
        return
    yield Heading("Right answers")
    if any(graded):
        yield _table(result, ANSWERS, "", lambda one: one.accuracy is not None and one.accuracy.difference is not None)
    else:
        remedy = "raise --max-tokens, leave --set ignore_eos=true out"
        yield Paragraph(f"No answer came to its end on both sides, so none was graded: {remedy}.", "caution")


def _memory(result: BenchResult) -> Iterator[Block]:
    target = result.target
    if target is None:
        return
    columns = [
        Column("configuration", "left"),
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
    result: BenchResult, facts: Sequence[Fact], title: str, wanted: Callable[[Measured], bool] = lambda one: True
) -> Table:
    """A cell's name stands in its first row only."""
    rows: list[list[str]] = []
    for cell in result.cells:
        label = cell.label
        for one in filter(wanted, cell.configurations):
            rows.append([label, result.configurations[one.configuration].label, *(fact.cell(one) for fact in facts)])
            label = ""
    return Table([Column("cell", "left"), Column("configuration", "left"), *facts], rows, title)


def _is_best(one: Measured, cell: Cell) -> bool:
    speedups = [other.speedup.value for other in cell.configurations if other.speedup]
    return one.speedup is not None and one.speedup.is_gain and one.speedup.value == max(speedups)
