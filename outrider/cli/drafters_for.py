"""`outrider ls drafters-for MODEL`: the drafters that were published for a model, which of them are
on this machine, and whether they fit."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outrider.cli import session
from outrider.report.text import to_json

if TYPE_CHECKING:
    from outrider.drafters.companions import Candidate


def list_drafters(model: str, json: bool) -> int:
    """Print the table, or one JSON object. Nothing is downloaded. Raises what a model's name or
    config raises."""
    from outrider.build import DEMO, embedded_heads
    from outrider.drafters.companions import MODEL, Target, candidates

    notes: list[str] = []
    session.quieten_libraries()
    target = Target(model, fetches=False)
    if not (target.is_here or target.ids or model == DEMO):
        _ = target.config  # raises what is wrong with the name
    own = [MODEL] if model == DEMO else []
    rows = [_embedded(model, kind) for kind in (*own, *embedded_heads(model, "cpu"))]
    rows += [] if model == DEMO else [_row(each) for each in candidates(target, notes)]
    if json:
        sys.stdout.write(to_json({"drafters_for": model, "drafters": rows, "notes": notes}) + "\n")
        return 0
    _print(model, rows)
    if rows and not (target.is_here or model == DEMO):
        notes.append(f"'{model}' is not on this machine, so what fits it cannot be known")
    for row in rows:
        if row["misfit"]:
            notes.append(f"{row['drafter']}: {row['misfit']}")
    for note in notes:
        session.say(f"note: {note}")
    return 0


def _embedded(model: str, kind: str) -> dict[str, Any]:
    return {
        "target": model,
        "drafter": "comes with it",
        "kind": kind,
        "licence": None,
        "source": None,
        "is_here": True,
        "fits": True,
        "misfit": None,
    }


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        **asdict(candidate.companion),
        "kind": candidate.kind or candidate.companion.kind,
        "is_here": candidate.folder is not None,
        "fits": candidate.fits,
        "misfit": candidate.misfit,
    }


def _print(model: str, rows: list[dict[str, Any]]) -> None:
    from outrider.report.console import print_blocks
    from outrider.report.document import Column, Table, word

    if not rows:
        session.say(f"no drafter of '{model}' is known: outrider train makes one")
        return
    headings = {
        "drafter": "drafter",
        "kind": "kind",
        "licence": "licence",
        "is_here": "on this machine",
        "fits": "fits",
        "source": "source",
    }
    columns = [Column(heading, "left") for heading in headings.values()]
    cells = [[word(row[name]) for name in headings] for row in rows]
    print_blocks([Table(columns, cells, f"drafters for {model}")])
