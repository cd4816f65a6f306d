"""A document on a terminal: its Markdown, as rich prints it. Piped output is not squeezed into 80
columns.

Code keeps its lines, to be copied whole, and an annotated text has colours; they only add to its
marks (tokens.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich import box, markdown
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text
from rich.theme import Theme

from outrider.report.document import Block, CodeBlock, Document, MarkedTokens, Paragraph
from outrider.report.markdown import block_markdown, tokens_heading
from outrider.report.text import clean, one_line
from outrider.report.tokens import runs

UNSQUEEZED = 10_000  # columns of a pipe
LONGEST_WORD = 24  # columns: words up to here are not broken, however narrow the terminal
MAX_TOKENS = 600  # of all texts; the HTML page shows all
TONES = {"plain": "none", "good": "bold green", "bad": "bold red", "caution": "yellow"}
FATES = {
    "prompt": "dim",
    "accepted": "green",
    "rejected": "red strike",
    "correction": "bold yellow",
    "bonus": "cyan",
    "plain": "",
    "mark": "dim",
}
LOOKS = {
    "markdown.h1": "bold",
    "markdown.h2": "bold underline",
    "markdown.h3": "bold",
    "markdown.table.border": "dim",
}


def print_document(document: Document, console: Console | None = None) -> None:
    """To standard output, or to `console`."""
    console = console or _standard_output()
    console.print(Text(one_line(document.title), "bold"))
    if document.subtitle:
        console.print(Text(one_line(document.subtitle), "dim"))
    print_blocks(document.blocks, console)


def print_blocks(blocks: Sequence[Block], console: Console | None = None) -> None:
    """Blocks alone, without a title."""
    console = console or _standard_output()
    left = MAX_TOKENS
    for block in blocks:
        if not isinstance(block, MarkedTokens):
            console.print()
            _print_block(block, console)
        elif left > 0:
            console.print()
            _print_tokens(block, left, console)
        left -= len(block.tokens) if isinstance(block, MarkedTokens) else 0
    if left < 0:
        console.print(Text(f"({-left} more tokens: the HTML page shows all)", "dim"))


def _print_block(block: Block, console: Console) -> None:
    match block:
        case CodeBlock():
            console.print(Text(clean(block.text), "cyan"), soft_wrap=True)
        case Paragraph():
            _print_markdown(block_markdown(block), console, TONES[block.tone])
        case _:
            _print_markdown(block_markdown(block), console)


def _standard_output() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = UNSQUEEZED
    return console


def _print_markdown(text: str, console: Console, quote: str = "none") -> None:
    """Without the spaces that rich fills lines with. `quote`: how a quotation looks."""
    lines = []
    with console.use_theme(Theme({**LOOKS, "markdown.block_quote": quote})):
        for segments in Segment.split_lines(console.render(_Markdown(text))):
            line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
            line.rstrip()
            lines.append(line)
    while lines and not lines[0]:
        del lines[0]
    for line in lines:
        console.print(line, soft_wrap=True)


class _Heading(markdown.Heading):
    """At the left, whatever its level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Table(markdown.TableElement):
    """Long names wrap, words and numbers are never cut."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        assert self.header is not None
        assert self.header.row is not None
        heads = [cell.content for cell in self.header.row.cells]
        rows = (
            [[cell.content for cell in row.cells] for row in self.body.rows]
            if self.body is not None
            else []
        )
        table = RichTable(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for head, *cells in zip(heads, *rows, strict=True):
            words = [word for text in (head, *cells) for word in text.plain.split()]
            widest = min(LONGEST_WORD, max(map(cell_len, words), default=0))
            table.add_column(head, justify=head.justify, min_width=widest, overflow="fold")
        for row in rows:
            table.add_row(*row)
        yield from _fitted(table, console, options)


def _fitted(table: RichTable, console: Console, options: ConsoleOptions) -> list[Segment]:
    """The table in the terminal's width, where its words allow that.

    rich widens columns to their longest word after it has fitted the table, so a smaller width may
    have to be asked for.
    """
    for width in range(options.max_width, options.max_width // 2, -1):
        segments = list(console.render(table, options.update(width=width)))
        if all(
            Segment.get_line_length(line) <= options.max_width
            for line in Segment.split_lines(segments)
        ):
            return segments
    return list(console.render(table, options))


class _Markdown(markdown.Markdown):
    elements: ClassVar[dict[str, type[markdown.MarkdownElement]]] = {
        **markdown.Markdown.elements,
        "heading_open": _Heading,
        "table_open": _Table,
    }


def _print_tokens(block: MarkedTokens, most: int, console: Console) -> None:
    _print_markdown(tokens_heading(block), console)
    pieces = [(text, FATES[kind]) for kind, text in runs(block.tokens[:most])]
    console.print()
    console.print(Text.assemble(*pieces), soft_wrap=True)
