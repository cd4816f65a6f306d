"""A document as Markdown: what a `.md` file holds, and what the terminal (console.py) and the page
(html.py) are made of.

Everything in a text that Markdown or HTML could read as its own is escaped. A chart is a table with
bars of letters; the page draws it. An annotated text keeps its marks (tokens.py) in <pre>, where GitHub
also shows underline and strike-through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape as escape_html

from outrider.report.document import (
    Block,
    Bullets,
    Chart,
    CodeBlock,
    Column,
    Document,
    Heading,
    MarkedTokens,
    Paragraph,
    Table,
)
from outrider.report.text import clean, one_line
from outrider.report.tokens import MEANING, fates, runs

SIGNS = {"plain": "", "good": "✅ ", "bad": "❌ ", "caution": "⚠️ "}
TAGS = {"accepted": "ins", "rejected": "del", "correction": "b", "bonus": "i"}
SAMPLES = {
    "prompt": "before ▌",
    "accepted": "between ‹ ›",
    "correction": "after [-rejected-]",
    "bonus": "before ⁺",
    "plain": "unmarked",
}
BAR = 24  # letters of the longest bar
MARK = "▸"  # before a row that stands out
LINE = 100  # letters of an annotated text before it is broken: GitHub breaks none
# inside a word _ is only a letter
_SPECIAL = re.compile(r"[\\`*<|~$]|&(?=[#\w])|](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])")
_BLOCK_START = re.compile(r"^(\s*)([-+=#>]|:(?=-)|\[(?=[ xX]\]))", re.MULTILINE)
_NUMBERED = re.compile(r"^(\s*\d+)(?=[.)])", re.MULTILINE)
_FENCE = re.compile(r"`{3,}")


def to_markdown(document: Document) -> str:
    """The whole report; ends with a newline."""
    parts = [f"# {_line(document.title)}"]
    if document.subtitle:
        parts.append(_started(_line(document.subtitle)))
    parts += map(block_markdown, document.blocks)
    return "\n\n".join(filter(None, parts)) + "\n"


def block_markdown(block: Block) -> str:
    """One block."""
    match block:
        case Heading():
            return f"{'#' * block.level} {_line(block.text)}"
        case Paragraph():
            return _paragraph(block)
        case Bullets():
            return "\n".join(f"- {_started(_line(item))}" for item in block.items)
        case CodeBlock():
            return _code(block)
        case Table():
            return table_markdown(block)
        case Chart():
            return table_markdown(chart_table(block))
        case MarkedTokens():
            return "\n\n".join(
                filter(None, [tokens_heading(block), f"<pre>\n{_marked_text(block)}\n</pre>"])
            )


def table_markdown(table: Table) -> str:
    """Title, rows (those that stand out in bold, with a mark), and below what the columns mean."""
    rows = []
    for number, row in enumerate(table.rows):
        cells = [_line(cell) for cell in row]
        if len(cells) == 1:
            cells = [_bold(cells[0]), *[""] * (len(table.columns) - 1)]
        if number in table.marked:
            cells = [_bold(cell) for cell in cells]
            cells[0] = f"{MARK} {cells[0]}".rstrip()
        rows.append(_row(cells))
    parts = [
        _bold(_line(table.title)),
        "\n".join([_head(table.columns), *rows]),
        meanings(table.columns),
    ]
    return "\n\n".join(filter(None, parts))


def meanings(columns: Sequence[Column]) -> str:
    """A line for each column that has a formula or a definition."""
    return "  \n".join(_meaning(column) for column in columns if column.help)


def chart_table(chart: Chart) -> Table:
    """The bars as text, alongside their numbers."""
    rows: list[list[str]] = []
    marked = set()
    for name, bars in chart.groups.items():
        if len(chart.groups) > 1:
            rows.append([name])
        for bar in bars:
            if bar.is_best:
                marked.add(len(rows))
            rows.append([bar.label, bar.text, "█" * round(BAR * chart.share(bar.value))])
    columns = [Column(chart.labels, "left"), Column(chart.values), Column("", "left")]
    return Table(columns, rows, chart.title, frozenset(marked))


def tokens_heading(block: MarkedTokens) -> str:
    """The lines before an annotated text: its title, and the legend of its marks."""
    counts = fates(block.tokens).items()
    legend = "; ".join(f"{SAMPLES[fate]}: {MEANING[fate]} ({count})" for fate, count in counts)
    return "\n\n".join(filter(None, [_bold(_line(block.title)), legend]))


def _paragraph(block: Paragraph) -> str:
    """Verdicts are quotes with a sign."""
    lines = (line.strip() for line in clean(block.text).split("\n"))
    text = "  \n".join(_started(_escaped(line)) for line in lines if line)
    if block.tone == "plain":
        return text
    return "\n".join(f"> {line}" for line in (SIGNS[block.tone] + text).split("\n"))


def _code(block: CodeBlock) -> str:
    text = clean(block.text)
    fence = "`" * (1 + max([2, *map(len, _FENCE.findall(text))]))
    return f"{fence}{re.sub('[^A-Za-z0-9-]', '', block.language)}\n{text}\n{fence}"


def _head(columns: Sequence[Column]) -> str:
    rule = "|".join(" ---: " if column.align == "right" else " --- " for column in columns)
    return f"{_row(_line(column.heading) for column in columns)}\n|{rule}|"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _meaning(column: Column) -> str:
    line = _started(f"{_line(column.heading)}: {_line(column.help)}")
    return f"\\{line}" if line.startswith("[") else line  # "[x]: y" would define a link


def _bold(text: str) -> str:
    return f"**{text}**" if text else text


def _marked_text(block: MarkedTokens) -> str:
    pieces = []
    column = 0
    for kind, text in runs(block.tokens):
        text, column = _broken(text, column)
        text = escape_html(text, quote=False)
        pieces.append(f"<{TAGS[kind]}>{text}</{TAGS[kind]}>" if kind in TAGS and text else text)
    return "".join(pieces).rstrip()


def _broken(text: str, column: int) -> tuple[str, int]:
    """Long lines broken, and the column after: ↵ marks the text's own line breaks, so the others
    can be distinguished."""
    out = []
    for letter in text:
        if letter == "\n":
            out.append("↵\n")
            column = 0
        elif (column >= LINE and letter == " ") or column >= LINE + 20:
            out.append(f"\n{letter}")
            column = 1
        else:
            out.append(letter)
            column += 1
    return "".join(out), column


def _line(text: str) -> str:
    return _escaped(one_line(text))


def _escaped(text: str) -> str:
    """A text that Markdown shows as it is, inside a line."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def _started(text: str) -> str:
    """Text escaped for the start of a line, where more characters have a meaning."""
    return _NUMBERED.sub(r"\1\\", _BLOCK_START.sub(r"\1\\\2", text))
