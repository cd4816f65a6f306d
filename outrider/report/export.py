"""The report of an export: what was written, and what was checked."""

from __future__ import annotations

from outrider.report.document import Block, Bullets, Document, Paragraph
from outrider.report.render import origin
from outrider.train.train_result import ExportResult


def document(result: ExportResult) -> Document:
    """Everything in it is in the result."""
    block: Block = (
        Bullets(result.checks) if result.checks else Paragraph("not checked: no --check", "caution")
    )
    title = f"Export: {result.drafter} for {result.target}, layout {result.layout}"
    return Document(title, origin(result, f"from {result.source}"), (block,))
