"""Studies of drafters, each one command and resumable: what training, distillation and stopping
bring, in tokens.

    python benchmarks/studies.py before-after     no training, every kind of head, n-gram and draft model against each other
    python benchmarks/studies.py quick            what `outrider train eagle3 --quick` trains in minutes
    python benchmarks/studies.py distil           a draft model before and after distillation, from four beginnings
    python benchmarks/studies.py acceptance       stop rules against fixed draft lengths: tokens drafted at equal tau
    python benchmarks/studies.py domain           one domain's answers, and what happens on the other
    python benchmarks/studies.py from-traffic     requests recorded by the server refresh the draft model
    python benchmarks/studies.py worked-solutions acceptance by kind of step, and what helps; docs/results/reasoning.md
    python benchmarks/studies.py occurrence       which place to copy from; prints its table, stores nothing
    python benchmarks/studies.py render           docs/results/heads.md from the newest results

Results are `benchmarks/results/studies-NAME-DATE.json`. Work that was cut goes on with the same
command; `runs/studies` holds it (remove a folder there to make that part anew). One thread:
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from study.acceptance import run_acceptance
from study.before_after import run_before_after
from study.distil import BEGINNINGS, run_distil
from study.domain import run_domain
from study.occurrence import run_occurrence
from study.quick import run_quick
from study.report import render
from study.report_worked import render_worked
from study.traffic import run_traffic
from study.worked import run_worked
from workload import REPOSITORY

from outrider.errors import OutriderError

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command("before-after")
def before_after(
    heads: Annotated[
        Path | None,
        typer.Option(help="Folder with runs of eagle3, block, medusa; else the embedded."),
    ] = None,
) -> None:
    """Every trained kind before and after training, beside what needs none."""
    run_before_after(heads)


@app.command()
def quick() -> None:
    """The head of `outrider train eagle3 --quick`."""
    run_quick()


@app.command()
def distil(
    only: Annotated[str, typer.Option(help="Beginnings, with commas between.")] = ",".join(
        BEGINNINGS
    ),
) -> None:
    """A draft model before and after distillation."""
    parts = only.split(",")
    if unknown := [part for part in parts if part not in BEGINNINGS]:
        raise typer.BadParameter(
            f"unknown beginnings: {', '.join(unknown)}; known: {', '.join(BEGINNINGS)}"
        )
    run_distil(parts)


@app.command()
def acceptance(
    only: Annotated[
        str, typer.Option(help="Workloads: pair, demo; with a comma between.")
    ] = "pair,demo",
) -> None:
    """Stop rules against fixed lengths."""
    run_acceptance(only.split(","))


@app.command()
def domain() -> None:
    """Distilled on one domain, measured on two."""
    run_domain()


@app.command("from-traffic")
def from_traffic() -> None:
    """Refreshed from what a server recorded."""
    run_traffic()


@app.command("worked-solutions")
def worked_solutions(
    target: Annotated[str, typer.Option(help="'demo' or a model.")] = "demo",
    draft: Annotated[
        str | None, typer.Option(help="The draft model; the demo has its own.")
    ] = None,
    workload: Annotated[
        str, typer.Option(help="A file or built-in name (docs/workloads.md).")
    ] = "demo",
    problems: Annotated[int, typer.Option(help="At most so many.", min=2)] = 40,
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = REPOSITORY
    / "docs"
    / "results"
    / "reasoning.md",
    only_page: Annotated[
        bool, typer.Option("--only-page", help="Measure nothing: the page of the newest result.")
    ] = False,
) -> None:
    """How far drafts are kept on worked solutions, by kind of step, and what would help."""
    if not only_page:
        run_worked(target, draft, workload, problems)
    render_worked(out)


@app.command()
def occurrence(
    prompts: Annotated[int, typer.Option(help="Of each kind.", min=1)] = 10,
) -> None:
    """Which of the places where the last tokens stood before is the best to copy from."""
    run_occurrence(prompts)


@app.command("render")
def render_(
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = REPOSITORY
    / "docs"
    / "results"
    / "heads.md",
) -> None:
    """The page, from the newest result of every study."""
    render(out)


if __name__ == "__main__":
    try:
        app()
    except OutriderError as error:
        raise SystemExit(f"error: {error}") from error
