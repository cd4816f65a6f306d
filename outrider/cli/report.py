"""`outrider report RESULT [OTHER]`: a saved result as a page again, or two of one kind side by side, the old one first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.lab import OUTPUT, OutputOptions
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.report.document import Document

ResultFile = Annotated[Path, typer.Argument(help="A result: what --out wrote.", show_default=False)]
OtherFile = Annotated[
    Path | None, typer.Argument(help="A newer result of the same kind, to compare with it.", show_default=False)
]
Html = Annotated[
    Path | None,
    typer.Option(help="Write the report as one HTML page, readable offline.", rich_help_panel=OUTPUT, show_default=False),
]
Markdown = Annotated[
    Path | None, typer.Option(help="Write the report as Markdown.", rich_help_panel=OUTPUT, show_default=False)
]
FailBelow = Annotated[
    float | None,
    typer.Option(help="Exit code 1 if a number is confirmed to be below this share of the old one: 0.97.", show_default=False),
]


def report(
    result: ResultFile, other: OtherFile = None, html: Html = None, markdown: Markdown = None, fail_below: FailBelow = None
) -> int:
    """Show a saved result, or compare two."""
    from outrider.lab.compare import compare, gate
    from outrider.lab.result import read_result
    from outrider.report.compare import document
    from outrider.report.render import render

    OutputOptions(html=html, markdown=markdown).check()
    if other is None and fail_below is not None:
        raise ConfigError("--fail-below compares two results: give the newer one after the older one")
    old = read_result(result)
    if other is None:
        _show(render(old), html, markdown)
        return 0
    comparison = compare(old, read_result(other))
    judged = None if fail_below is None else gate(comparison, fail_below)
    _show(document(comparison, judged), html, markdown)
    return 1 if judged is not None and judged.failed else 0


def _show(document: Document, html: Path | None, markdown: Path | None) -> None:
    """Print it, and write it where asked."""
    from outrider.report.console import print_document
    from outrider.report.html import to_html
    from outrider.report.markdown import to_markdown

    for path, writer in ((html, to_html), (markdown, to_markdown)):
        if path is not None:
            try:
                path.write_text(writer(document), encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    print_document(document)
    for path in filter(None, (html, markdown)):
        sys.stderr.write(f"written: {path}\n")
