"""`outrider report RESULT [OTHER]`: a saved result as a page again, or two of one kind side by side, the old one first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.lab import REPORTS, OutputOptions, Reports, show
from outrider.cli.verbs import with_groups
from outrider.errors import ConfigError

ResultFile = Annotated[Path, typer.Argument(help="A result: what --out wrote.", show_default=False)]
OtherFile = Annotated[
    Path | None, typer.Argument(help="A newer result of the same kind, to compare with it.", show_default=False)
]
FailBelow = Annotated[
    float | None,
    typer.Option(help="Exit code 1 if a number is confirmed to be below this share of the old one: 0.97.", show_default=False),
]


@with_groups
def report(result: ResultFile, other: OtherFile = None, out: Reports = None, fail_below: FailBelow = None) -> int:
    """Show a saved result, or compare two."""
    from outrider.lab.compare import compare, gate
    from outrider.lab.result import read_result
    from outrider.report.compare import document
    from outrider.report.render import render

    output = OutputOptions(out=out)
    output.check(*REPORTS)
    if other is None and fail_below is not None:
        raise ConfigError("--fail-below compares two results: give the newer one after the older one")
    old = read_result(result)
    if other is None:
        show(render(old), output)
        return 0
    comparison = compare(old, read_result(other))
    judged = None if fail_below is None else gate(comparison, fail_below)
    show(document(comparison, judged), output)
    return 1 if judged is not None and judged.failed else 0
