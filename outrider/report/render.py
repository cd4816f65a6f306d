"""From a result to a document, one function per kind of result; and what stands at both ends of
most of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from outrider.lab.result import Result
from outrider.report.document import Block, Bullets, Document, Heading, Paragraph

if TYPE_CHECKING:
    from outrider.lab.bench.bench_result import OtherProcesses

INTERRUPTED = "Interrupted: this is what was known when the run was stopped; it rests on less than was asked for."
RENDERERS = {
    "bench": "outrider.report.bench",
    "tune": "outrider.report.tune",
    "explain": "outrider.report.explain",
    "certify": "outrider.report.certify",
    "estimate": "outrider.report.estimate",
    "replay": "outrider.report.replay",
    "train": "outrider.report.train",
    "export": "outrider.report.export",
}


def render(result: Result) -> Document:
    """The report of a result, by its kind."""
    make: Callable[[Result], Document] = import_module(RENDERERS[result.kind]).document
    document = make(result)
    if not result.interrupted:
        return document
    return replace(document, blocks=(Paragraph(INTERRUPTED, "caution"), *document.blocks))


def origin(result: Result, *facts: str) -> str:
    """One line under a title: date, version, processor, and what else there is to say. Empty facts
    are left out."""
    words = [
        f"{result.created:%Y-%m-%d %H:%M} UTC",
        f"outrider {result.versions.get('outrider', '?')}",
    ]
    return " · ".join(filter(None, [*words, str(result.machine.get("cpu", "")), *facts]))


def to_keep_in_mind(result: Result) -> list[Block]:
    """The result's notes, where it has any."""
    return [Heading("To keep in mind"), Bullets(result.notes)] if result.notes else []


def disturbed(disturbances: Mapping[str, OtherProcesses | None]) -> list[Block]:
    """Runs that had other processes besides them, and how much of the processors those used."""
    bullets = [
        f"{where}: {processes.num_disturbed} of {processes.num_runs} runs disturbed "
        f"(others used more than {processes.allowed:.0%} of the "
        f"processors); others used {processes.mean:.0%} on average over all runs, at most {processes.highest:.0%}"
        + (
            f"; {processes.num_repeated} runs are the calmest of several attempts"
            if processes.num_repeated
            else ""
        )
        for where, processes in disturbances.items()
        if processes is not None and processes.num_disturbed
    ]
    if not bullets:
        return []
    text = (
        "Disturbed: other processes ran during the measurement. Both sides of a speedup were "
        "measured in the same minutes, but "
        "speeds are too low, and speedups are uncertain beyond their intervals. Measure again on a machine that is idle."
    )
    return [Paragraph(text, "caution"), Bullets(bullets)]
