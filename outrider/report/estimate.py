"""The report of an estimate: a verdict, a chart by draft length, the formula's numbers, memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from outrider.errors import counted
from outrider.lab.estimate.estimate_result import EstimateResult, LengthEstimate, ModelSize
from outrider.report.document import (
    Bar,
    Block,
    Cells,
    Chart,
    Document,
    Heading,
    Paragraph,
    Table,
    Tone,
    table,
)
from outrider.report.render import HARDLY, origin, to_keep_in_mind
from outrider.report.text import amount, number


def document(result: EstimateResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [
        Paragraph(*verdict(result)),
        _chart(result),
        Paragraph(_premises(result)),
        _lengths(result),
    ]
    blocks += [*_memory(result), *to_keep_in_mind(result)]
    return Document(
        "Estimate of speculative decoding",
        origin(result, "from a formula, nothing was run"),
        blocks,
    )


def verdict(result: EstimateResult) -> tuple[str, Tone]:
    """One sentence, and how it is meant."""
    best = result.lengths[result.best]
    if result.best == 0:
        edges = [length for length in result.lengths if length.break_even_alpha is not None]
        lowest = min(edges, key=lambda length: length.break_even_alpha or 0.0, default=None)
        needed = (
            "at these costs no acceptance is high enough"
            if lowest is None
            else f"α would have to be above {number(lowest.break_even_alpha, 3)}, with k = {lowest.num_draft_tokens}"
        )
        return (
            f"Do not speculate: every draft length is slower than plain decoding; {needed}.",
            "bad",
        )
    verb = "is" if result.best == 1 else "are"
    text = (
        f"{counted(result.best, 'draft token')} per step {verb} best: {best.speedup:.2f}x the "
        "speed of plain decoding"
    )
    if best.speedup < HARDLY:
        return f"Hardly a gain. {text}, and an estimate can be off by as much.", "caution"
    return f"Speculation should pay. {text}.", "good"


def _premises(result: EstimateResult) -> str:
    acceptance = ", ".join(number(share) for share in result.acceptance)
    where = (
        "at every position"
        if len(result.acceptance) == 1
        else "by position, the last one for all after it"
    )
    return f"This rests on acceptance {acceptance} ({where}) and on costs from {result.source}."


def _chart(result: EstimateResult) -> Chart:
    bars = []
    for length in result.lengths:
        k = length.num_draft_tokens
        tone: Tone = "good" if length.speedup > 1 else "bad" if length.speedup < 1 else "plain"
        text = number(length.speedup, unit="x")
        bars.append(Bar(str(k), text, length.speedup, tone=tone, is_best=k == result.best))
    groups = {"": bars}
    return Chart("Speedup by draft length", "k", "estimated speedup", groups, baseline=1.0)


def _lengths(result: EstimateResult) -> Table:
    cells: Cells[LengthEstimate] = {
        "k": lambda length: str(length.num_draft_tokens),
        "estimated speedup": lambda length: number(length.speedup, unit="x"),
        "tokens per pass": lambda length: number(length.tau),
        "step": lambda length: number(length.step_cost) + ("*" if length.extrapolated else ""),
        "break-even α": lambda length: number(length.break_even_alpha, 3),
    }
    if result.mixture is not None:
        cells["distinct experts"] = lambda length: number(length.experts)
    for alpha, speedups in result.by_alpha.items():
        cells[f"α {alpha:g}"] = partial(_at, speedups)
    title = "By draft length; last the speedup if every position accepted with α"
    return table(
        result.lengths, cells, title, lambda length: length.num_draft_tokens == result.best
    )


def _at(speedups: Sequence[float], length: LengthEstimate) -> str:
    return number(speedups[length.num_draft_tokens], unit="x")


MEMORY: Cells[ModelSize] = {
    "model": lambda model: f"{model.role}: {model.name}",
    "weights": lambda model: amount(model.weights_bytes),
    "KV cache": lambda model: amount(1000 * model.kv_bytes_per_token),
}


def _memory(result: EstimateResult) -> list[Block]:
    if not result.memory:
        return []
    weights = {model.role: model.weights_bytes for model in result.memory}
    blocks: list[Block] = [Heading("Memory")]
    if len(weights) == 2 and weights["target"]:
        share = f"{weights['draft'] / weights['target']:.1%}"
        blocks.append(Paragraph(f"The draft adds {share} to the target's weights."))
    return [*blocks, table(result.memory, MEMORY)]
