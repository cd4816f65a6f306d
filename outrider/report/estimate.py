"""The report of an estimate: a verdict, the three models by length and over alpha, memory, the roof, and what to doubt."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.lab.estimate.estimate_result import EstimateResult, ModelEstimate
from outrider.report.document import Block, Bullets, Column, Document, Heading, Paragraph, Plot, Series, Table, Tone
from outrider.report.heading import origin, to_keep_in_mind
from outrider.report.remote import remote
from outrider.report.text import amount, number, times

HARDLY = 1.05  # a predicted gain below this is within what such an estimate can be off
CURVES = {"measured": "measured curve", "roofline": "roofline curve", "flat": "flat curve"}
FORMULAS = {
    "leviathan": "(1 - α^(γ+1)) / ((1 - α) (γc + 1)): one α, passes of one price (Leviathan et al. 2211.17192, Theorem 3.8)",
    "envelope": "effective γ · T / (γ·t + T), T a target pass, t a draft token: kept draft tokens alone, not the target's own",
    "curve": "τ · seconds of a plain step / seconds of a step with γ draft tokens; acceptance by position, cost by pass length",
}


def document(result: EstimateResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [Paragraph(*verdict(result)), Bullets(_premises(result))]
    blocks += [_lengths(result), _models(result), _alpha_plot(result)]
    blocks += [*remote(result.remote), *_memory(result), *_roof(result)]
    blocks += to_keep_in_mind(result)
    return Document("Estimate of speculative decoding", origin(result, "from formulas, nothing was run"), blocks)


def verdict(result: EstimateResult) -> tuple[str, Tone]:
    """One sentence, and how it is meant."""
    gamma, curve = result.num_draft_tokens, _model(result, "curve")
    here, best = f"γ = {gamma}: {times(curve.speedup)}", curve.best_num_draft_tokens
    better = f"γ = {best}: {times(curve.best_speedup)}"
    edge = _break_even(curve.break_even_alpha, result.equivalent_alpha)
    if not result.pays:
        if best == 0:
            return f"do not speculate: {edge} ({here} by the {CURVES[result.cost_source]})", "bad"
        return f"γ = {gamma} does not pay: {times(curve.speedup)}, {edge}; {better} would be best", "bad"
    text = f"{here} by the {CURVES[result.cost_source]}" + _rates(result)
    if best != gamma:
        text += f"; {better} would be best"
    if curve.speedup < HARDLY:
        return f"{text}. That is hardly a gain: an estimate can be off by as much", "caution"
    return text, "good"


def _break_even(edge: float | None, alpha: float) -> str:
    if edge is None:
        return "no α breaks even"
    return f"break-even α {number(edge, 3)}, you have {number(alpha, 3)}"


def _rates(result: EstimateResult) -> str:
    if not result.is_timed:
        return ""
    plain, drafting = (result.lengths[gamma].curve.tokens_per_s for gamma in (0, result.num_draft_tokens))
    return f", {number(drafting, 0)} tokens/s instead of {number(plain, 0)}"


def _premises(result: EstimateResult) -> list[str]:
    """What goes in."""
    given = result.input.acceptance
    kept = ", ".join(number(value) for value in given) if given else ""
    found = [
        f"acceptance by position {kept}; α {number(result.alpha, 3)} (accepted / tested over them)" if given
        else f"α {number(result.alpha, 3)} (accepted / tested), the same at every position",
        f"c {number(result.c, 3)} (seconds of a draft token / seconds of a plain target pass)",
    ]  # fmt: skip
    if result.is_timed:
        plain = result.lengths[0].curve
        found.append(
            f"a plain step takes {_ms(plain.step_s)} for {_rows(result.num_rows)}: {number(plain.tokens_per_s, 0)} tokens/s"
        )
    if result.context is not None:
        found.append(f"{_rows(result.num_rows)} of {result.context} tokens each in the KV cache")
    return found


def _lengths(result: EstimateResult) -> Table:
    by_position = result.input.acceptance is not None
    columns = [Column("γ", help="draft tokens per step; 0: plain decoding")]
    if by_position:
        columns.append(Column("τ, one α", help="(1 - α^(γ+1)) / (1 - α)"))
    columns += [
        Column("Leviathan", help=FORMULAS["leviathan"]),
        Column("effective γ", help="kept draft tokens per step: S(1) + ... + S(γ), S(i) = P(at least i kept)"),
        Column("envelope", help=FORMULAS["envelope"]),
        Column("τ", help="tokens per target pass, the target's own included: 1 + effective γ"),
        Column(CURVES[result.cost_source], help=FORMULAS["curve"]),
    ]
    if result.is_timed:
        columns += [
            Column("step, ms", help="drafting, target pass and overhead"),
            Column("tokens/s", help="rows · τ / step"),
        ]
    rows = []
    for one in result.lengths:
        row = [str(one.num_draft_tokens)]
        row += [number(one.leviathan_tau)] if by_position else []
        row += [times(one.leviathan_speedup), number(one.effective_gamma), times(one.envelope_speedup)]
        row += [number(one.curve.tau), times(one.curve.speedup) + ("*" if one.curve.cost_extrapolated else "")]
        row += [_ms(one.curve.step_s).removesuffix(" ms"), number(one.curve.tokens_per_s, 1)] if result.is_timed else []
        rows.append(row)
    star = " (* beyond what was measured)" if any(one.curve.cost_extrapolated for one in result.lengths) else ""
    return Table(columns, rows, f"Speedup by draft length{star}", frozenset({result.num_draft_tokens}))


def _models(result: EstimateResult) -> Table:
    gamma = result.num_draft_tokens
    columns = [
        Column("model", align="left"),
        Column(f"speedup at γ = {gamma}"),
        Column(
            f"break-even α at γ = {gamma}",
            help="α, the same at every position, from which this length is faster than plain decoding",
        ),
        Column("best γ", help="0: do not speculate"),
        Column("speedup there"),
        Column("lowest break-even α", help="over all lengths tried; with it the length"),
    ]
    rows = [
        [
            _label(result, one.name), times(one.speedup), number(one.break_even_alpha, 3), str(one.best_num_draft_tokens),
            times(one.best_speedup), _lowest(one),
        ]
        for one in result.models
    ]  # fmt: skip
    return Table(columns, rows, "The three models", frozenset({len(rows) - 1}))


def _lowest(one: ModelEstimate) -> str:
    return (
        "none"
        if one.lowest_break_even_alpha is None
        else f"{number(one.lowest_break_even_alpha, 3)} (γ = {one.lowest_break_even_length})"
    )


def _alpha_plot(result: EstimateResult) -> Plot:
    """Break-even is where a line crosses 1: marked, as is the present alpha."""
    points, curve = result.sensitivity, _model(result, "curve")
    alphas = [point.alpha for point in points]
    series = [
        Series("Leviathan", [point.leviathan for point in points]),
        Series("envelope", [point.envelope for point in points]),
        Series(CURVES[result.cost_source], [point.curve for point in points]),
    ]
    if curve.break_even_alpha is not None:
        series.append(
            _mark(
                f"break-even of the {CURVES[result.cost_source]}: α {number(curve.break_even_alpha, 3)}",
                alphas,
                curve.break_even_alpha,
                1.0,
            )
        )
    same = "" if result.input.acceptance is None else " (gives the τ of your positions)"
    series.append(
        _mark(f"you: α {number(result.equivalent_alpha, 3)}{same}", alphas, result.equivalent_alpha, curve.speedup)
    )
    title = f"Speedup over α, the same at every position, at γ = {result.num_draft_tokens}"
    return Plot(title, "α = accepted / tested", "speedup", alphas, series, baseline=1.0)


def _mark(label: str, alphas: Sequence[float], at: float, height: float) -> Series:
    """A single point, at the place closest to `at`: the result has one there."""
    nearest = min(range(len(alphas)), key=lambda index: abs(alphas[index] - at))
    return Series(label, [height if index == nearest else None for index in range(len(alphas))])


def _memory(result: EstimateResult) -> list[Block]:
    found = result.memory
    if found is None:
        return []
    columns = [
        Column("", align="left"),
        Column("weights"),
        Column("KV cache", help=_kv_help(result)),
    ]
    rows = [["draft", amount(found.draft_weights_bytes), _amount(found.draft_kv_bytes)]]
    if found.target_weights_bytes is not None:
        rows.insert(0, ["target", amount(found.target_weights_bytes), _amount(found.target_kv_bytes)])
    share = f": the draft adds {found.share:.1%}" if found.share is not None else ""
    return [Heading(f"Memory{share}"), Table(columns, rows)]


def _kv_help(result: EstimateResult) -> str:
    return "" if result.context is None else f"{_rows(result.num_rows)} x {result.context} tokens"


def _roof(result: EstimateResult) -> list[Block]:
    roof = result.roof
    if roof is None:
        return []
    lines = [f"a target pass over one token per row takes {_ms(roof.target_pass_s)} at best"]
    if roof.draft_pass_s is not None:
        lines.append(f"a draft pass {_ms(roof.draft_pass_s)}")
    if roof.free_tokens is not None:
        width = f"γ = {result.num_draft_tokens}, {result.num_draft_tokens + 1} tokens per row"
        tokens = f"query tokens beyond the first cost nothing up to {roof.free_tokens:.1f} per row"
        lines.append(
            tokens
            if roof.free_tokens >= 1
            else "even plain decoding waits for arithmetic, not for memory: every checked token costs"
        )
        rows = "at any batch size" if roof.free_rows is None else f"up to a batch size of {int(roof.free_rows)}"
        lines.append(f"with {width}, the target's pass waits for memory {rows}" if roof.free_rows is None or roof.free_rows >= 1
                     else f"with {width}, the target's pass is bound by arithmetic at every batch size")  # fmt: skip
    return [Heading("The machine's roof"), Bullets(lines)]


def _model(result: EstimateResult, name: str) -> ModelEstimate:
    return next(one for one in result.models if one.name == name)


def _label(result: EstimateResult, name: str) -> str:
    return {"leviathan": "Leviathan", "envelope": "envelope", "curve": CURVES[result.cost_source]}[name]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _amount(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else amount(num_bytes)


def _rows(count: int) -> str:
    return f"{count} row" + "s" * (count != 1)
