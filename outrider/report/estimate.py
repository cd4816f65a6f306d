"""The report of an estimate: a verdict, the formula by draft length, how it depends on acceptance,
memory."""

from __future__ import annotations

from outrider.errors import counted
from outrider.lab.estimate.estimate_result import EstimateResult, LengthEstimate, ModelSize
from outrider.report.document import (
    Block,
    Document,
    Fact,
    Heading,
    Paragraph,
    Plot,
    Table,
    Tone,
    curves,
    table,
)
from outrider.report.render import origin, to_keep_in_mind
from outrider.report.text import amount, number, times

HARDLY = 1.05  # a predicted gain below this is within what such an estimate can be off


def document(result: EstimateResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [
        Paragraph(*verdict(result)),
        Paragraph(_premises(result)),
        _lengths(result),
        _plot(result),
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
    text = f"{counted(result.best, 'draft token')} per step {verb} best: {times(best.speedup)} the speed of plain decoding"
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


def _lengths(result: EstimateResult) -> Table:
    facts: list[Fact[LengthEstimate]] = [
        Fact(
            "k",
            lambda length: str(length.num_draft_tokens),
            "draft tokens per step; 0: plain decoding",
        ),
        Fact(
            "τ",
            lambda length: number(length.tau),
            "tokens per step, the target's own included: 1 + S(1) + ... + S(k)",
        ),
        Fact("step", _cost, "time of a step in plain steps, v(k + 1) + k c" + _star(result)),
        Fact("speedup", lambda length: times(length.speedup), "τ / step"),
        Fact(
            "break-even α",
            lambda length: number(length.break_even_alpha, 3),
            "acceptance, equal at all positions, from which this length is faster than plain "
            "decoding",
        ),
    ]
    return table(result.lengths, facts, "Speedup by draft length", frozenset({result.best}))


def _cost(length: LengthEstimate) -> str:
    return number(length.step_cost) + ("*" if length.extrapolated else "")


def _star(result: EstimateResult) -> str:
    return (
        "; *: beyond what was measured"
        if any(length.extrapolated for length in result.lengths)
        else ""
    )


def _plot(result: EstimateResult) -> Plot:
    lines = {
        f"α {alpha:g}": dict(enumerate(speedups)) for alpha, speedups in result.by_alpha.items()
    }
    if len(result.acceptance) > 1 or result.acceptance[0] not in result.by_alpha:
        lines["yours"] = {length.num_draft_tokens: length.speedup for length in result.lengths}
    return curves("If every position accepted with α", "k", "speedup", lines, baseline=1.0)


def _memory(result: EstimateResult) -> list[Block]:
    if not result.memory:
        return []
    facts: list[Fact[ModelSize]] = [
        Fact("model", lambda model: f"{model.role}: {model.name}", align="left"),
        Fact("weights", lambda model: amount(model.weights_bytes)),
        Fact(
            "KV cache",
            lambda model: amount(1000 * model.kv_bytes_per_token),
            "keys and values of 1,000 tokens of a text",
        ),
    ]
    weights = {model.role: model.weights_bytes for model in result.memory}
    blocks: list[Block] = [Heading("Memory")]
    if len(weights) == 2 and weights["target"]:
        blocks.append(
            Paragraph(
                f"The draft adds {weights['draft'] / weights['target']:.1%} to the target's "
                "weights."
            )
        )
    return [*blocks, table(result.memory, facts)]
