"""A report as blocks, each of which is Markdown (markdown.py).

A result becomes a `Document` in one function (`outrider/report/KIND.py: document(result)`). The
terminal prints its Markdown through rich (console.py), and the page is made of it (html.py); plots
and annotated texts are drawn there. Renderers compute nothing that a reader could not recompute
from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
Tone = Literal["plain", "good", "bad", "caution"]


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
    best)."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Fact(Generic[T]):
    """A column, and what it says of one subject."""

    heading: str
    cell: Callable[[T], str]
    help: str = ""
    align: Literal["left", "right"] = "right"

    @property
    def column(self) -> Column:
        """The column without its cells."""
        return Column(self.heading, self.align, self.help)


def table(
    subjects: Iterable[T],
    facts: Sequence[Fact[T]],
    title: str = "",
    marked: frozenset[int] = frozenset(),
) -> Table:
    """A row for each subject."""
    rows = [[fact.cell(subject) for fact in facts] for subject in subjects]
    return Table([fact.column for fact in facts], rows, title, marked)


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Two columns: what, and how it is."""
    rows = [[name, word(value)] for name, value in facts.items()]
    return Table([Column("what", "left"), Column("value", "left")], rows, title)


def word(value: Any) -> str:
    """A value in a cell."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True)
class Series:
    """One line. `low`/`high`: ends of intervals."""

    label: str
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class Plot:
    """Lines over common x values."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    series: Sequence[Series]
    baseline: float | None = None  # a horizontal line, like speedup 1
    log_x: bool = False


def curves(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Mapping[Any, float | None]],
    *,
    baseline: float | None = None,
    log_x: bool = False,
) -> Plot:
    """Lines given by their values over x; a gap where one has none."""
    x = sorted({at for line in lines.values() for at in line})
    series = [Series(label, [line.get(at) for at in x]) for label, line in lines.items()]
    return Plot(title, x_label, y_label, x, series, baseline, log_x)


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


Block = Heading | Paragraph | Bullets | CodeBlock | Table | Plot | MarkedTokens


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str = ""  # date, machine, versions in one line
    blocks: Sequence[Block] = ()
