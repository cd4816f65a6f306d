"""From a result to a document: one function per kind of result, each in a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from outrider.lab.result import Result
from outrider.report.document import Document, Paragraph

INTERRUPTED = "Interrupted: this is what was known when the run was stopped; it rests on less than was asked for."
RENDERERS = {
    "bench": "outrider.report.bench",
    "tune": "outrider.report.tune",
    "explain": "outrider.report.explain",
    "certify": "outrider.report.certify",
    "estimate": "outrider.report.estimate",
    "replay": "outrider.report.replay",
    "server": "outrider.report.server_advice",
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
