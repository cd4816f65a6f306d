"""`outrider pull MODEL`: a model's files from the hub, before anything runs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import session
from outrider.cli.lab import INTERRUPTED
from outrider.cli.verbs import with_groups
from outrider.errors import counted
from outrider.report.text import amount

Model = Annotated[
    str,
    typer.Argument(
        help="A hub id; of one GGUF file USER/REPO:FILE.gguf, or USER/REPO:Q4_K_M.",
        show_default=False,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="The model's branch, tag or commit on the hub.", show_default=False),
]


@with_groups
def pull(model: Model, revision: Revision = None) -> int:
    """Download a model from the hub, or what is missing of it."""
    if model == "demo":
        typer.echo("demo comes with outrider: there is nothing to download")
        return 0
    from outrider.models.fetching import fetch

    try:
        files = fetch(model, revision)
    except KeyboardInterrupt:
        session.say("interrupted: the same command downloads the rest")
        return INTERRUPTED
    num_bytes = sum(file.stat().st_size for file in files)
    folder = os.path.commonpath([file.parent for file in files])
    typer.echo(f"{amount(num_bytes)} in {counted(len(files), 'file')}: {folder}")
    if not Path(model).expanduser().exists():
        chosen = "" if revision is None else f" --revision {revision}"
        typer.echo(f"outrider run {model}{chosen}")
    return 0
