"""`outrider report RESULT [OTHER]`: a saved result as a page again, or two of one kind side by
side, the old one first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.lab import REPORTS, OutputOptions, Reports, show
from outrider.cli.verbs import with_groups
from outrider.extras import check_lab

ResultFile = Annotated[Path, typer.Argument(help="A result: what --out wrote.", show_default=False)]
OtherFile = Annotated[
    Path | None,
    typer.Argument(help="A newer result of the same kind, to compare with it.", show_default=False),
]


@with_groups
def report(result: ResultFile, other: OtherFile = None, out: Reports = None) -> int:
    """Show a saved result, or compare two."""
    check_lab("report")
    from outrider.lab.compare import compare
    from outrider.lab.result import read_result
    from outrider.report.compare import document
    from outrider.report.render import render

    output = OutputOptions(out=out)
    output.check(*REPORTS)
    old = read_result(result)
    rendered = render(old) if other is None else document(compare(old, read_result(other)))
    show(rendered, output)
    return 0
