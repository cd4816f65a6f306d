"""A report as blocks, each of which is Markdown (markdown.py).

A result becomes a `Document` in one function (`outrider/report/KIND.py: document(result)`). The
terminal prints its Markdown through rich (console.py), and the page is made of it (html.py); charts
and annotated texts are drawn there. Renderers compute nothing that a reader could not recompute
from the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from outrider.report.meanings import MEANINGS

T = TypeVar("T")
Cells = dict[str, Callable[[T], str]]  # a column's heading, and what it says of a subject
Tone = Literal["plain", "good", "bad", "caution"]
NOTHING = "-"  # a cell where there is no number
_NUMBER = re.compile(r"[-+x]?\s?\d\S*( \S+){0,2}|-")


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2  # 2 or 3; the document's title is level 1


@dataclass(frozen=True)
class Paragraph:
    """`tone`: "good", "bad" and "caution" stand out (a verdict, a warning); there is always a word
    too, never colour alone."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class CodeBlock:
    """Something to copy: a command line, a configuration."""

    text: str
    language: str = ""


@dataclass(frozen=True)
class Column:
    heading: str
    align: Literal["left", "right"] = "right"
    help: str = ""  # the formula or definition, shown below the table


@dataclass(frozen=True)
class Table:
    """Cells are finished text. `marked`: numbers of rows that stand out (the recommendation, the
    best). A row with a single cell is a heading of those below it."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    marked: frozenset[int] = frozenset()


def table(
    subjects: Iterable[T] | Mapping[str, Sequence[T]],
    cells: Cells[T],
    title: str = "",
    marked: Callable[[T], bool] = lambda subject: False,
) -> Table:
    """A row for each subject, under the names of groups where there are several. Columns that say
    nothing of anyone are left out, but for the first."""
    groups = subjects if isinstance(subjects, Mapping) else {"": list(subjects)}
    every = [subject for group in groups.values() for subject in group]
    columns: dict[str, Column] = {}
    for heading, cell in cells.items():
        texts = [cell(subject) for subject in every]
        if not columns or any(text != NOTHING for text in texts):
            is_number = all(_NUMBER.fullmatch(text) for text in texts)
            align: Literal["left", "right"] = "right" if is_number else "left"
            columns[heading] = Column(heading, align, MEANINGS.get(heading, ""))
    rows: list[list[str]] = []
    marks = set()
    for name, group in groups.items():
        if len(groups) > 1:
            rows.append([name])
        for subject in group:
            if marked(subject):
                marks.add(len(rows))
            rows.append([cells[heading](subject) for heading in columns])
    return Table(list(columns.values()), rows, title, frozenset(marks))


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Two columns: what, and how it is."""
    rows = [[name, word(value)] for name, value in facts.items()]
    return Table([Column("what", "left"), Column("value", "left")], rows, title)


def word(value: Any) -> str:
    """A value in a cell."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: NOTHING}[value]
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True)
class Bar:
    """A bar from 0 to its value, with its number as text. `low`/`high`: ends of an interval.
    `is_best`: it stands out."""

    label: str
    text: str
    value: float
    low: float | None = None
    high: float | None = None
    tone: Tone = "plain"
    is_best: bool = False


@dataclass(frozen=True)
class Chart:
    """Bars on one scale, in named groups where there are several."""

    title: str
    labels: str  # heading of the bars' names
    values: str  # heading of their numbers
    groups: Mapping[str, Sequence[Bar]]
    baseline: float | None = None  # a line across all bars, like speedup 1
    scale: float | None = None  # where it ends; None: as `end` finds

    @property
    def end(self) -> float:
        """The end of the scale: room for every bar, and for intervals that are not much wider."""
        bars = [bar for group in self.groups.values() for bar in group]
        longest = max([bar.value for bar in bars] + [self.baseline or 0.0])
        highest = max([bar.high or 0.0 for bar in bars], default=0.0)
        return self.scale or max(longest, min(highest, 1.3 * longest)) or 1.0

    def share(self, value: float) -> float:
        """The part of the scale that a value takes, 0..1."""
        return min(max(value / self.end, 0.0), 1.0)


@dataclass(frozen=True)
class Token:
    """One token of a text that is coloured by fate. `hover`: lines of numbers, shown when pointed
    at or tapped."""

    text: str
    fate: Literal["prompt", "accepted", "correction", "bonus", "plain"]
    rejected: str = ""  # the draft token that the correction replaced, shown struck through
    hover: str = ""


@dataclass(frozen=True)
class MarkedTokens:
    title: str
    tokens: Sequence[Token]


Block = Heading | Paragraph | Bullets | CodeBlock | Table | Chart | MarkedTokens


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str = ""  # date, machine, versions in one line
    blocks: Sequence[Block] = ()
