"""Tables for a terminal: the registries and the doctor's findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

WORDS = {True: "yes", False: "no", None: "-"}
WIDEST = 1000  # columns of a table that is piped


def show(table: Table) -> None:
    """Print to stdout. Piped output is as wide as the table."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table, options=console.options.update(max_width=WIDEST)).maximum)
    console.print(table)


def registry_table(title: str, facts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Name, summary and facts of every entry; what cannot be imported says so."""
    table = _table(title)
    for heading in ("name", *facts, "summary"):
        table.add_column(heading.replace("_", " "), no_wrap=heading == "name", overflow="fold")
    for row in rows:
        facts_found = [_word(row.get(fact)) for fact in facts]
        summary = f"[red]{escape(row['error'])}[/red]" if "error" in row else escape(row["summary"])
        table.add_row(row["name"], *facts_found, summary)
    return table


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Two columns: what, and how it is."""
    table = _table(title)
    table.show_header = False
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, value in facts.items():
        table.add_row(name, _word(value))
    return table


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")


def _word(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return WORDS[value]
    return escape(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
