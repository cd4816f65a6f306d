"""The report of `explain URL` and `tune URL`: what the server's counters and clocks say, then what they cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outrider.counted import counted
from outrider.lab.server.server_result import LevelAdvice, ServerResult, Standing
from outrider.lab.tune.export.vllm import batch_size_table
from outrider.report import server
from outrider.report.document import Block, Bullets, CodeBlock, Column, Document, Heading, Paragraph, Table
from outrider.report.render import origin, to_keep_in_mind
from outrider.report.text import number

FORECAST = "(1 + kept tokens of so many) / (cost of such a pass / plain pass), costs in equal steps between the two measured"


def document(result: ServerResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [Bullets(result.findings)]
    if result.question == "tune":
        blocks += [_advice(result.advice), *_in_other_words(result)]
    blocks += [*_standing(result.standing), *server.blocks(result.servers)]
    blocks += [Heading("What a server cannot tell"), Bullets(result.unknown), *to_keep_in_mind(result)]
    engine = " ".join(filter(None, (result.server.server.engine, result.server.server.version)))
    title = f"{result.question.capitalize()}: {result.server.server.model} on {engine}"
    return Document(title, origin(result, f"{result.workload} by {result.server.url}"), tuple(blocks))


def _advice(rows: list[LevelAdvice]) -> Table:
    columns = [
        Column("load", "left"), Column("draft tokens", help="a pass, on average, those without a draft included"),
        Column("tokens/pass"), Column("pass (ms)", help="mean ms a token behind the first x tokens a pass"),
        Column("plain (ms)", help="mean ms a token behind the first, of the server without drafts"),
        Column("now", help="speedup measured: plain ms a token / ms a token"), Column("best", help="draft tokens; 0: none"),
        Column("then", help=f"speedup by forecast: {FORECAST}"),
    ]  # fmt: skip
    cells = [
        [
            one.level.label, number(one.num_draft_tokens, 1), number(one.tokens_per_pass), number(one.pass_ms, 1),
            number(one.plain_pass_ms, 1), number(one.measured), "-" if one.best is None else str(one.best),
            number(max(one.forecast, default=None)),
        ]
        for one in rows
    ]  # fmt: skip
    return Table(columns, cells, title="Draft tokens by load")


def _in_other_words(result: ServerResult) -> Iterator[Block]:
    """Draft lengths by load as options of `outrider serve` and of vLLM."""
    if not result.table:
        return
    if not any(size for _, size in result.table):
        yield Paragraph("Do not speculate on this server: plain decoding is as fast at every load that was measured.", "bad")
        return
    yield Heading("In other words", 3)
    text = ",".join(f"{start}:{size}" for start, size in result.table)
    yield CodeBlock(f"outrider serve ... --num-draft-tokens {text if len(result.table) > 1 else result.table[0][1]}", "bash")
    longest = max(size for _, size in result.table)
    config: dict[str, Any] = {"num_speculative_tokens": longest}
    if len(result.table) > 1:
        config |= {"num_speculative_tokens_per_batch_size": batch_size_table(result.table)}
    yield Paragraph("vLLM, beside the method in its --speculative-config:")
    yield CodeBlock(json.dumps(config), "json")


def _standing(found: Standing | None) -> Iterator[Block]:
    if found is None:
        return
    lines = []
    counts = found.speculation
    if counts is not None and counts.num_steps:
        used = number(counts.draft_utilisation)
        passes = counted(counts.num_steps, "pass")
        lines.append(f"{passes} with a draft, {number(counts.tau)} tokens each; {used} of the draft accepted")
    if found.num_generated is not None:
        lines.append(f"{found.num_generated} tokens generated")
    if found.cache_hits is not None:
        lines.append(f"{found.cache_hits:.0%} of the prompt tokens came from the prefix cache")
    if found.running is not None or found.waiting is not None:
        lines.append(f"when this run began, {number(found.running, 0)} requests ran and {number(found.waiting, 0)} waited")
    if lines:
        yield Heading("All traffic since the server started", 3)
        yield Bullets(lines)
