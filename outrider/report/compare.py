"""The report of a comparison: what differs between the runs first, then a verdict, then every
number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from outrider.errors import counted
from outrider.lab.compare import Change, Comparison, Difference
from outrider.lab.result import Interval, Result
from outrider.report.document import Block, Bullets, Cells, Document, Heading, Paragraph, table
from outrider.report.text import figure, with_interval

MAX_NAMES = 12
WORDS = {
    "better": "✓ better", "worse": "✗ worse", "higher": "higher", "lower": "lower", "same": "same", "no evidence": "no evidence",
}  # fmt: skip


def document(comparison: Comparison) -> Document:
    """Everything in it is in the comparison."""
    blocks: list[Block] = [*_machines(comparison), *_verdict(comparison)]
    blocks.append(table(comparison.changes, COLUMNS, "All numbers", _is_worse))
    blocks += _missing("Only in the old result", comparison.only_old)
    blocks += _missing("Only in the new result", comparison.only_new)
    if comparison.others:
        blocks += [Heading("What else differs"), table(comparison.others, DIFFERENCES)]
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
        yield table(comparison.machines, DIFFERENCES)


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


COLUMNS: Cells[Change] = {
    "number": lambda change: _label(change),
    "verdict": lambda change: WORDS[change.verdict],
    "change": lambda change: _written(change),
    "old": lambda change: _number(change.old),
    "new": lambda change: _number(change.new),
}


def _is_worse(change: Change) -> bool:
    return change.verdict == "worse"


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


DIFFERENCES: Cells[Difference] = {
    "what": lambda difference: difference.what,
    "old": lambda difference: difference.old,
    "new": lambda difference: difference.new,
}
