"""The report of an estimate: a verdict, three models by length and over alpha, a draft service, memory, the roof, doubts."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.counted import counted
from outrider.lab.estimate.estimate_result import (
    EstimateResult,
    LengthEstimate,
    ModelEstimate,
    RemoteEstimate,
    RemoteLength,
)
from outrider.report.document import (
    Block,
    Bullets,
    Column,
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

CURVES = {"measured": "measured curve", "roofline": "roofline curve", "flat": "flat curve"}
HARDLY = 1.05  # a predicted gain below this is within what such an estimate can be off


def document(result: EstimateResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [Paragraph(*verdict(result)), Bullets(list(_premises(result)))]
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


def _premises(result: EstimateResult) -> Iterator[str]:
    """What the estimate starts from."""
    given = result.input.acceptance
    kept = ", ".join(number(value) for value in given) if given else ""
    yield from [
        f"acceptance by position {kept}; α {number(result.alpha, 3)} (accepted / tested over them)" if given
        else f"α {number(result.alpha, 3)} (accepted / tested), the same at every position",
        f"c {number(result.c, 3)} (seconds of a draft token / seconds of a plain target pass)",
    ]  # fmt: skip
    if result.is_timed:
        plain = result.lengths[0].curve
        rows, speed = counted(result.num_rows, "row"), number(plain.tokens_per_s, 0)
        yield f"a plain step takes {_ms(plain.step_s)} for {rows}: {speed} tokens/s"
    if result.context is not None:
        yield f"{counted(result.num_rows, 'row')} of {result.context} tokens each in the KV cache"


def _lengths(result: EstimateResult) -> Table:
    facts: list[Fact[LengthEstimate]] = [
        Fact("γ", lambda one: str(one.num_draft_tokens), "draft tokens per step; 0: plain decoding")
    ]
    if result.input.acceptance is not None:
        facts.append(Fact("τ, one α", lambda one: number(one.leviathan_tau), "(1 - α^(γ+1)) / (1 - α)"))
    facts += [
        Fact(
            "Leviathan", lambda one: times(one.leviathan_speedup),
            "(1 - α^(γ+1)) / ((1 - α) (γc + 1)): one α, passes of one price (Leviathan et al. 2211.17192, Theorem 3.8)",
        ),
        Fact(
            "effective γ", lambda one: number(one.effective_gamma),
            "kept draft tokens per step: S(1) + ... + S(γ), S(i) = P(at least i kept)",
        ),
        Fact(
            "envelope", lambda one: times(one.envelope_speedup),
            "effective γ · T / (γ·t + T), T a target pass, t a draft token: kept draft tokens alone, not the target's own",
        ),
        Fact("τ", lambda one: number(one.curve.tau), "tokens per target pass, the target's own included: 1 + effective γ"),
        Fact(
            CURVES[result.cost_source], lambda one: times(one.curve.speedup) + ("*" if one.curve.cost_extrapolated else ""),
            "τ · seconds of a plain step / seconds of a step with γ draft tokens; acceptance by position, cost by pass length",
        ),
    ]  # fmt: skip
    if result.is_timed:
        facts += [
            Fact("step, ms", lambda one: f"{1e3 * one.curve.step_s:.3g}", "drafting, target pass and overhead"),
            Fact("tokens/s", lambda one: number(one.curve.tokens_per_s, 1), "rows · τ / step"),
        ]
    star = " (* beyond what was measured)" if any(one.curve.cost_extrapolated for one in result.lengths) else ""
    return table(result.lengths, facts, f"Speedup by draft length{star}", frozenset({result.num_draft_tokens}))


def _models(result: EstimateResult) -> Table:
    gamma = result.num_draft_tokens
    names = {"leviathan": "Leviathan", "envelope": "envelope", "curve": CURVES[result.cost_source]}
    facts: list[Fact[ModelEstimate]] = [
        Fact("model", lambda one: names[one.name], align="left"),
        Fact(f"speedup at γ = {gamma}", lambda one: times(one.speedup)),
        Fact(
            f"break-even α at γ = {gamma}", lambda one: number(one.break_even_alpha, 3),
            "α, the same at every position, from which this length is faster than plain decoding",
        ),
        Fact("best γ", lambda one: str(one.best_num_draft_tokens), "0: do not speculate"),
        Fact("speedup there", lambda one: times(one.best_speedup)),
        Fact("lowest break-even α", _lowest, "over all lengths tried; with it the length"),
    ]  # fmt: skip
    return table(result.models, facts, "The three models", frozenset({len(result.models) - 1}))


def _lowest(one: ModelEstimate) -> str:
    if one.lowest_break_even_alpha is None:
        return "none"
    return f"{number(one.lowest_break_even_alpha, 3)} (γ = {one.lowest_break_even_length})"


def _alpha_plot(result: EstimateResult) -> Plot:
    """Break-even is where a line crosses 1: marked, as is the present alpha."""
    curve, name = _model(result, "curve"), CURVES[result.cost_source]
    lines: dict[str, dict[float, float | None]] = {
        "Leviathan": {point.alpha: point.leviathan for point in result.sensitivity},
        "envelope": {point.alpha: point.envelope for point in result.sensitivity},
        name: {point.alpha: point.curve for point in result.sensitivity},
    }
    if curve.break_even_alpha is not None:
        lines[f"break-even of the {name}: α {number(curve.break_even_alpha, 3)}"] = {_drawn(result, curve.break_even_alpha): 1.0}
    same = "" if result.input.acceptance is None else " (gives the τ of your positions)"
    lines[f"you: α {number(result.equivalent_alpha, 3)}{same}"] = {_drawn(result, result.equivalent_alpha): curve.speedup}
    title = f"Speedup over α, the same at every position, at γ = {result.num_draft_tokens}"
    return curves(title, "α = accepted / tested", "speedup", lines, baseline=1.0)


def _drawn(result: EstimateResult, alpha: float) -> float:
    """The drawn point closest to an alpha: the result has one there, up to rounding."""
    return min((point.alpha for point in result.sensitivity), key=lambda drawn: abs(drawn - alpha))


def _memory(result: EstimateResult) -> list[Block]:
    found = result.memory
    if found is None:
        return []
    kv_help = "" if result.context is None else f"{counted(result.num_rows, 'row')} x {result.context} tokens"
    columns = [Column("", "left"), Column("weights"), Column("KV cache", help=kv_help)]
    rows = [["draft", amount(found.draft_weights_bytes), _amount(found.draft_kv_bytes)]]
    if found.target_weights_bytes is not None:
        rows.insert(0, ["target", amount(found.target_weights_bytes), _amount(found.target_kv_bytes)])
    share = f": the draft adds {found.share:.1%}" if found.share is not None else ""
    return [Heading(f"Memory{share}"), Table(columns, rows)]


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


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _amount(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else amount(num_bytes)


def remote(found: RemoteEstimate | None) -> list[Block]:
    """A verdict of their own, and all ways by length; nothing where no service was asked about."""
    if found is None:
        return []
    return [Heading("Drafts from a service"), Paragraph(*remote_verdict(found)), *remote_lengths(found)]


def remote_verdict(found: RemoteEstimate) -> tuple[str, Tone]:
    """One sentence about a draft service, and how it is meant."""
    both = f"{times(found.speedup)}; {times(found.co_located_speedup)} with the draft in the target's process"
    if not found.pays or not found.in_time:
        return f"do not have a service draft over this line: {both}", "bad"
    at = f"a service {_milliseconds(found.rtt_s)} ms away, γ = {found.best_num_draft_tokens}: {both}"
    return (f"{at}. That is hardly a gain", "caution") if found.speedup < HARDLY else (at, "good")


def remote_lengths(found: RemoteEstimate) -> list[Block]:
    """What the verdict on a draft service rests on."""
    too_late = "a reply takes longer than a plain step, and drafter 'remote' waits no longer than that: it decodes plainly"
    facts: list[Fact[RemoteLength]] = [
        Fact("γ", lambda one: str(one.num_draft_tokens)),
        Fact("target's step, ms", lambda one: _milliseconds(one.target_s), "without drafting"),
        Fact("reply, ms", lambda one: _milliseconds(one.reply_s), "round trip and drafting"),
        Fact(
            "service", lambda one: times(one.speedup),
            "τ · plain step / (target's step + reply): every step waits for its draft",
        ),
        Fact(
            "co-located", lambda one: times(one.co_located_speedup),
            "τ · plain step / (target's step + drafting): in the target's process",
        ),
    ]  # fmt: skip
    title = f"Speedup with a round trip of {_milliseconds(found.rtt_s)} ms"
    lengths = table(found.lengths, facts, title, frozenset({found.best_num_draft_tokens - 1}))
    return [lengths] if found.in_time else [Paragraph(too_late, "caution"), lengths]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
