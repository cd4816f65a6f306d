"""A document as Markdown, for GitHub and everything else that reads CommonMark with tables.

A plot becomes the table of its numbers: Mermaid's charts, the other choice, have neither intervals nor legends, and are raw code
outside GitHub. Everything that Markdown or HTML could read as its own is escaped. A text by fate keeps its marks
(report/tokens.py) inside <pre>, where GitHub also shows underline and strike-through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape as escape_html

from outrider.report.document import (
    Block,
    Bullets,
    CodeBlock,
    Column,
    Document,
    Heading,
    MarkedTokens,
    Paragraph,
    Plot,
    Table,
)
from outrider.report.plotted import caption, numbers
from outrider.report.text import clean, one_line
from outrider.report.tokens import MEANING, fates, runs

SIGNS = {"plain": "", "good": "✅ ", "bad": "❌ ", "caution": "⚠️ "}
TAGS = {"accepted": "ins", "rejected": "del", "correction": "b", "bonus": "i"}
LONG_TABLE, LONG_TEXT = 24, 600  # rows, tokens: from here on folded
LINE = 100  # letters of a text by fate before it is broken
_SPECIAL = re.compile(r"[\\`*<|~$]|&(?=[#\w])|](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])")  # inside a word _ is only a letter
_BLOCK_START = re.compile(r"^(\s*)([-+=#>]|:(?=-)|\[(?=[ xX]\])|\d+(?=[.)]))", re.MULTILINE)
_FENCE = re.compile(r"`{3,}")


def to_markdown(document: Document) -> str:
    """Ends with a newline. Raises ValueError for a plot whose series do not fit its x."""
    parts = [f"# {_line(document.title)}"]
    if document.subtitle:
        parts.append(_started(_line(document.subtitle)))
    for block in document.blocks:
        parts += _parts(block)
    return "\n\n".join(part for part in parts if part) + "\n"


def _parts(block: Block) -> Iterator[str]:
    match block:
        case Heading():
            yield f"{'#' * block.level} {_line(block.text)}"
        case Paragraph():
            yield _paragraph(block)
        case Bullets():
            yield "\n".join(f"- {_started(_line(item))}" for item in block.items)
        case CodeBlock():
            yield _code(block)
        case Table():
            yield from _table(block)
        case Plot():
            yield from _table(replace(numbers(block), title=caption(block)))
        case MarkedTokens():
            yield from _tokens(block)


def _paragraph(block: Paragraph) -> str:
    """Verdicts are quotes with a sign."""
    text = "  \n".join(map(_escaped, filter(None, (line.strip() for line in clean(block.text).split("\n")))))
    if block.tone == "plain":
        return _started(text)
    return "\n".join(f"> {line}" for line in (SIGNS[block.tone] + text).split("\n"))


def _code(block: CodeBlock) -> str:
    text = clean(block.text)
    fence = "`" * (1 + max([2, *(len(found) for found in _FENCE.findall(text))]))
    return f"{fence}{re.sub('[^A-Za-z0-9-]', '', block.language)}\n{text}\n{fence}"


def _table(block: Table) -> Iterator[str]:
    if block.title:
        yield _bold(block.title)
    rows = [_row([_marked(_line(cell), number in block.marked) for cell in row]) for number, row in enumerate(block.rows)]
    table = "\n".join([_head(block.columns), *rows])
    yield _folded(f"{len(block.rows)} rows", table) if len(block.rows) > LONG_TABLE else table
    yield "  \n".join(_explained(column) for column in block.columns if column.help)


def _explained(column: Column) -> str:
    line = _started(f"{_line(column.heading)}: {_line(column.help)}")
    return f"\\{line}" if line.startswith("[") else line  # "[x]: y" would define a link


def _head(columns: Sequence[Column]) -> str:
    rule = "|".join(" ---: " if column.align == "right" else " --- " for column in columns)
    return f"{_row([_line(column.heading) for column in columns])}\n|{rule}|"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _marked(cell: str, marked: bool) -> str:
    return f"**{cell}**" if marked and cell else cell


def _bold(text: str) -> str:
    return _marked(_line(text), marked=True)


def _tokens(block: MarkedTokens) -> Iterator[str]:
    pieces = [(kind, escape_html(text, quote=False)) for kind, text in _broken(list(runs(block.tokens)))]
    text = "".join(f"<{TAGS[kind]}>{text}</{TAGS[kind]}>" if kind in TAGS and text else text for kind, text in pieces)
    yield _bold(block.title)
    yield _legend(fates(block.tokens))
    pre = f"<pre>\n{text.rstrip()}\n</pre>"
    yield _folded(f"{len(block.tokens)} tokens", pre) if len(block.tokens) > LONG_TEXT else pre


def _broken(pieces: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Long lines broken, since GitHub does not: ↵ marks the text's own line breaks, so the others can be distinguished."""
    column = 0
    for kind, text in pieces:
        out = ""
        for letter in text:
            if letter == "\n":
                out, column = out + "↵\n", 0
                continue
            if (column >= LINE and letter == " ") or column >= LINE + 20:
                out, column = out + "\n", 0
            out, column = out + letter, column + 1
        yield kind, out


def _legend(count: dict[str, int]) -> str:
    samples = {
        "prompt": "before ▌", "accepted": "between ‹ ›", "correction": "after [-rejected-]", "bonus": "before ⁺",
        "plain": "unmarked",
    }  # fmt: skip
    return "; ".join(f"{samples[fate]}: {MEANING[fate]} ({number})" for fate, number in count.items())


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def _line(text: str) -> str:
    return _escaped(one_line(text))


def _escaped(text: str) -> str:
    """A text that Markdown shows as it is, inside a line."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def _started(text: str) -> str:
    """Text escaped for the start of a line, where more characters have a meaning."""
    return _BLOCK_START.sub(lambda found: f"{found[1]}\\{found[2]}" if not found[2].isdigit() else f"{found[0]}\u2060", text)
