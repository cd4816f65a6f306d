"""`outrider export FOLDER`: a trained drafter in the layout that vLLM, SGLang, Medusa's code or
transformers reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.lab import command_line
from outrider.cli.session import progress, quieten_libraries
from outrider.cli.typed import check_folder
from outrider.cli.verbs import with_groups
from outrider.demo import demo_paths
from outrider.errors import ConfigError

Folder = Annotated[
    Path,
    typer.Argument(
        help="A drafter: what 'outrider train' left in DIR/drafter.", show_default=False
    ),
]
TargetOption = Annotated[
    str,
    typer.Option(
        help="The target that it drafts for: 'demo', a local folder, or a hub id.",
        show_default=False,
    ),
]
To = Annotated[
    str,
    typer.Option(
        help="Layout: raw, speculators, fp8, medusa, vllm or transformers.", show_default=False
    ),
]
Out = Annotated[Path, typer.Option(help="New folder.", show_default=False)]
Check = Annotated[bool, typer.Option(help="Load it again, compare every tensor and the config.")]
Card = Annotated[
    Path | None,
    typer.Option(
        help="A result of 'outrider bench' with this drafter: OUT/README.md becomes its model card.",
        metavar="FILE.json",
        show_default=False,
    ),
]
Licence = Annotated[
    str | None,
    typer.Option(
        "--license",
        help="Of the drafter, for its card.",
        metavar="NAME",
        show_default="the target's, where its card says it",
    ),
]


@with_groups
def export(
    folder: Folder,
    target: TargetOption,
    to: To,
    out: Out,
    check: Check = False,
    card: Card = None,
    license: Licence = None,
) -> int:
    """Write a trained drafter in a published layout."""
    from outrider import build
    from outrider.report.card import card as model_card
    from outrider.report.card import licence_of, read_bench
    from outrider.report.console import print_document
    from outrider.report.render import render
    from outrider.train import export as exporting
    from outrider.train.train_result import EXPORT_FILE, ExportResult

    check_folder(out)
    measured = None if card is None else read_bench(card)
    if license is not None and card is None:
        raise ConfigError("--license is of a card: give --card FILE.json, too")
    with progress(f"loading {target}") as status:
        quieten_libraries()
        if to not in exporting.LAYOUTS:
            raise ConfigError(f"--to takes one of {', '.join(exporting.LAYOUTS)}; got '{to}'")
        # refuses a folder that is no drafter before the target is loaded
        exporting.writer_for(folder, to)
        loaded = exporting.Target.load(
            str(demo_paths().target) if target == build.DEMO else target, target
        )
        status(f"writing {out}")
        if measured is not None:  # before anything is written
            kind = exporting.kind_of(folder)
            text = model_card(
                measured,
                kind=kind,
                layout=to,
                target=target,
                name=out.name,
                licence=license or licence_of(target),
            )
        kind = exporting.export(folder, to, out, loaded)
        if measured is not None:
            (out / "README.md").write_text(text, encoding="utf-8")
        result = ExportResult(
            drafter=kind,
            layout=to,
            source=str(folder),
            target=target,
            command=command_line(),
            checks=exporting.check(folder, kind, to, out, loaded) if check else [],
        )
        result.write(out / EXPORT_FILE)
    sys.stdout.write(f"{kind} written to {out} in layout {to}\n")
    if check:
        print_document(render(result))
    return 0
