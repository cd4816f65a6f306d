"""The report of an export: what was written, what was checked, and acceptance here and in vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.lab.result import Result
from outrider.report.document import Block, Bullets, Column, Document, Paragraph, Table
from outrider.train.export_result import WITHIN, Acceptance, Compared, ExportResult


def document(result: Result) -> Document:
    """Everything in it is in the result."""
    assert isinstance(result, ExportResult)
    blocks: list[Block] = [Bullets(result.checks)] if result.checks else []
    blocks += [Paragraph(result.not_compared, "caution")] if result.compared is None else _compared(result.compared)
    words = [f"{result.created:%Y-%m-%d %H:%M} UTC", f"outrider {result.versions.get('outrider', '?')}"]
    title = f"Export: {result.drafter} for {result.target}, layout {result.layout}"
    return Document(title, " · ".join([*words, f"from {result.source}"]), tuple(blocks))


def _compared(found: Compared) -> Iterator[Block]:
    difference = f"tau in vLLM differs from ours by {found.tau_ratio - 1:+.1%}"
    limit = f"{WITHIN:.0%}".replace("%", " %")
    if found.is_within:
        yield Paragraph(f"Within {limit}: {difference}.", "good")
    else:
        yield Paragraph(f"Beyond {limit}: {difference}, so vLLM computes other drafts with this folder.", "bad")
    columns = [
        Column("engine", align="left"), Column("drafts"), Column("accepted"), Column("tau", help="tau = 1 + accepted / drafts"),
        Column("accepted at 1, 2, ...", align="left", help="share of the drafts whose j-th token was accepted"),
    ]  # fmt: skip
    rows = [_row("outrider", found.outrider), _row(f"vllm {found.versions.get('vllm', '?')}", found.vllm)]
    yield Table(columns, rows, f"Method {found.method}, {found.num_draft_tokens} draft tokens per step")
    yield Bullets([
        f"{found.num_prompts} prompts, {found.max_new_tokens} tokens each, greedy, {found.dtype}; every draft counts in full",
        f"{found.same_texts} of {found.num_prompts} answers are the same token by token; in the others our target chose another "
        f"token {found.departures} times (rounding turns ties around), and ours went on along vLLM's text",
    ])  # fmt: skip


def _row(engine: str, one: Acceptance) -> list[str]:
    shares = " ".join(f"{share:.2f}" for share in one.per_position)
    return [engine, str(one.drafts), str(one.accepted), f"{one.tau:.3f}", shares]
