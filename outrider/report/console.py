"""A document on a terminal. Piped output is not squeezed into 80 columns, and colour never carries meaning alone.

Texts are never read as markup, and what a model or a file put into them cannot steer the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from outrider.report.document import Block, Bullets, CodeBlock, Document, Heading, MarkedTokens, Paragraph, Plot, Table
from outrider.report.plotted import caption, numbers
from outrider.report.text import clean, one_line
from outrider.report.tokens import MARKS, MEANING, fates, runs

UNSQUEEZED = 10_000  # columns of a pipe
LONGEST_WORD = 24  # columns: words up to here are not broken, however narrow the terminal
MAX_ROWS = 24  # of a plot's numbers
MAX_TOKENS = 600  # of one text; the HTML page shows all
SIGNS = {"plain": "", "good": "✓ ", "bad": "✗ ", "caution": "! "}
TONES = {"plain": "", "good": "bold green", "bad": "bold red", "caution": "yellow"}
FATES = {
    "prompt": "dim", "accepted": "green", "rejected": "red strike", "correction": "bold yellow", "bonus": "cyan", "plain": "",
    "mark": "dim",
}  # fmt: skip
SAMPLES = {  # what stands before and behind a token of each fate
    **MARKS, "prompt": ("text", MARKS["prompt"][1]), "correction": ("draft".join(MARKS["rejected"]), ""),
}  # fmt: skip


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
    for block in blocks:
        for part in _parts(block):
            console.print(part, soft_wrap=isinstance(block, CodeBlock | MarkedTokens), crop=False)


def _standard_output() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = UNSQUEEZED
    return console


def _parts(block: Block) -> Iterator[RenderableType]:
    match block:
        case Heading():
            text = Text("\n" + one_line(block.text), "bold")
            yield text
            if block.level == 2:
                yield Text("─" * text.cell_len, "dim")
        case Paragraph():
            yield Text("\n" + SIGNS[block.tone] + clean(block.text), TONES[block.tone])
        case Bullets():
            yield ""
            for item in block.items:
                grid = RichTable.grid(padding=(0, 1))
                grid.add_row("•", Text(clean(item)))
                yield grid
        case CodeBlock():
            yield Text("\n" + clean(block.text), "cyan")
        case Table():
            yield from _table(block)
        case Plot():
            yield from _plot(block)
        case MarkedTokens():
            yield from _tokens(block)


def _table(block: Table) -> Iterator[RenderableType]:
    """Rows that stand out are bold, and have a mark before them. Long names wrap, numbers are never cut."""
    yield Text("\n" + one_line(block.title), "bold") if block.title else ""
    table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    if block.marked:
        table.add_column("", no_wrap=True)
    for index, column in enumerate(block.columns):
        words = " ".join([one_line(column.heading), *(one_line(row[index]) for row in block.rows)]).split()
        widest = min(LONGEST_WORD, max(map(cell_len, words), default=0))
        table.add_column(Text(one_line(column.heading)), justify=column.align, min_width=widest, overflow="fold")
    for number, row in enumerate(block.rows):
        marked = number in block.marked
        mark = ["▸" if marked else ""] if block.marked else []
        table.add_row(*mark, *(Text(one_line(cell)) for cell in row), style="bold" if marked else "")
    yield table
    for column in block.columns:
        if column.help:
            yield Text(f"  {one_line(column.heading)}: {one_line(column.help)}", "dim")


def _plot(plot: Plot) -> Iterator[RenderableType]:
    """Its numbers; of many x values evenly spread ones, the first and the last among them."""
    table = numbers(plot)
    last, step = len(table.rows) - 1, -(-len(table.rows) // MAX_ROWS)
    rows = [row for number, row in enumerate(table.rows) if number % step == 0 or number == last]
    yield from _table(replace(table, rows=rows, title=caption(plot)))


def _tokens(block: MarkedTokens) -> Iterator[RenderableType]:
    shown = list(islice(block.tokens, MAX_TOKENS))
    yield Text("\n" + one_line(block.title), "bold")
    for fate, count in fates(block.tokens).items():
        before, after = SAMPLES[fate]
        token = "" if fate == "prompt" else "token"
        yield Text.assemble("  ", (before, "dim"), (token, FATES[fate]), (f"{after}  {MEANING[fate]}: {count}", "dim"))
    yield Text.assemble(*((text, FATES[kind]) for kind, text in runs(shown)))
    if len(block.tokens) > len(shown):
        yield Text(f"({len(block.tokens) - len(shown)} more tokens: the HTML page shows all)", "dim")
