"""The report of a comparison: what differs between the runs first, then a verdict, then every
number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from outrider.errors import counted
from outrider.lab.compare import Change, Comparison, Difference
from outrider.lab.result import Interval, Result
from outrider.report.document import Block, Bullets, Column, Document, Heading, Paragraph, Table
from outrider.report.text import figure, with_interval

MAX_NAMES = 12
METHOD = "new / old, or new - old of numbers that may be 0; as of independent runs (MOVER, Zou & Donner 2008)"
WORDS = {
    "better": "✓ better", "worse": "✗ worse", "higher": "higher", "lower": "lower", "same": "same", "no evidence": "no evidence",
}  # fmt: skip


def document(comparison: Comparison) -> Document:
    """Everything in it is in the comparison."""
    blocks: list[Block] = [*_machines(comparison), *_verdict(comparison)]
    blocks.append(_table(comparison.changes))
    blocks += _missing("Only in the old result", comparison.only_old)
    blocks += _missing("Only in the new result", comparison.only_new)
    if comparison.others:
        blocks += [Heading("What else differs"), _differences(comparison.others)]
    title = f"Comparison of two results of {comparison.old.kind}"
    return Document(title, f"old: {_run(comparison.old)}; new: {_run(comparison.new)}", blocks)


def _run(run: Result) -> str:
    return f"{run.created:%Y-%m-%d %H:%M}, outrider {run.versions.get('outrider', 'unknown')}"


def _machines(comparison: Comparison) -> Iterator[Block]:
    if comparison.machines:
        yield Paragraph(
            "Different machines: times and speeds below compare machines, they do not say that a "
            "version became faster or slower.",
            "bad",
        )
        yield _differences(comparison.machines)


def _verdict(comparison: Comparison) -> Iterator[Block]:
    """Counts of verdicts; the counts expected by chance stand alongside them."""
    changes = comparison.changes
    count = {verdict: sum(change.verdict == verdict for change in changes) for verdict in WORDS}
    judged = [
        f"{number} {verdict}"
        for verdict, number in count.items()
        if number and verdict != "no evidence"
    ]
    silent = (
        [f"{count['no evidence']} without evidence of a change"] if count["no evidence"] else []
    )
    text = f"Of {counted(len(changes), 'number')}: {', '.join(judged + silent)}."
    yield Paragraph(text, "bad" if count["worse"] else "good" if count["better"] else "plain")
    measured = [change for change in changes if change.is_measured]
    if len(measured) > 1:
        level = min(change.change.level for change in measured)
        chance = (1 - level) * len(measured)
        yield Paragraph(
            f"{len(measured)} were measured, with intervals of {level:.0%}: if nothing had "
            f"changed, about {chance:.1f} of them would still differ by chance."
        )


def _table(changes: Sequence[Change]) -> Table:
    columns = [
        Column("number", align="left", help="↑ higher is better, ↓ lower is better"),
        Column(
            "verdict",
            align="left",
            help="no evidence: the interval of the change includes no change at all",
        ),
        Column("change", help=METHOD),
        Column("old"),
        Column("new"),
    ]
    rows = [
        [
            _label(change),
            WORDS[change.verdict],
            _written(change),
            _number(change.old),
            _number(change.new),
        ]
        for change in changes
    ]
    marked = frozenset(index for index, change in enumerate(changes) if change.verdict == "worse")
    return Table(columns, rows, "All numbers", marked)


def _label(change: Change) -> str:
    arrow = {True: " ↑", False: " ↓", None: ""}[change.higher_is_better]
    unit = "" if change.label.endswith(change.unit) else f", {change.unit}"
    return change.label + unit + arrow


def _number(number: float | Interval) -> str:
    if isinstance(number, Interval):
        # None: an open end
        low, high = (end if math.isfinite(end) else None for end in (number.low, number.high))
        return with_interval(number.value, low, high)
    return figure(number)


def _written(change: Change) -> str:
    text = _number(change.change if change.is_measured else change.change.value)
    if change.scale == "ratio":
        return f"x {text}"
    return f"+{text}" if change.change.value > 0 else text


def _missing(title: str, labels: Sequence[str]) -> Iterator[Block]:
    if labels:
        more = [f"and {len(labels) - MAX_NAMES} more"] if len(labels) > MAX_NAMES else []
        yield Heading(title, 3)
        yield Bullets([*labels[:MAX_NAMES], *more])


def _differences(differences: Sequence[Difference]) -> Table:
    columns = [
        Column("what", align="left"),
        Column("old", align="left"),
        Column("new", align="left"),
    ]
    return Table(
        columns, [[difference.what, difference.old, difference.new] for difference in differences]
    )
