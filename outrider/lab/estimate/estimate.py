"""What speculation would bring, by three models side by side, without running anything: docs/algorithms/estimate.md.

The curve decides: with nothing but alpha and c it is Leviathan's formula, and everything more that is known (acceptance by
position, measured times, sizes with FLOPS) enters there alone. Notes say what was assumed, and which measurements were
stretched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.lab.estimate.curves import StepCosts, break_even, predict, predict_best
from outrider.lab.estimate.estimate_result import (
    EstimateInput,
    EstimateResult,
    LengthEstimate,
    MemoryOverhead,
    ModelEstimate,
    ModelName,
    Roof,
    Sensitivity,
)
from outrider.lab.estimate.inputs import AssumedAcceptance, Costs, acceptance_of, costs_of, knows_kv, load_of, longest
from outrider.lab.estimate.remote import remote_of
from outrider.lab.estimate.roofline import DecodeLoad, ModelSize, free_rows, free_tokens, pass_seconds
from outrider.sampling.theory import (
    alpha_of_tau,
    break_even_alpha,
    envelope_speedup,
    predicted_speedup,
    survival_of,
    tau,
)

ALPHAS = [step / 10 for step in range(11)]  # of the sensitivity, beside the alphas that matter
NOISE = 0.02  # change of measured times that goes without saying


@dataclass(frozen=True)
class SpeedupModel:
    """One of the three. `speedup(alpha, survival, gamma)`: over plain decoding; `break_even(gamma)`: alpha or None."""

    name: ModelName
    speedup: Callable[[float, Sequence[float], int], float]
    break_even: Callable[[int], float | None]


def estimate(asked: EstimateInput) -> EstimateResult:
    """Answer from formulas. Raises ConfigError that says what would be enough, CapabilityError for mixtures of experts whose
    times are wanted from their size.
    """
    length = longest(asked)
    load = load_of(asked)
    acceptance, costs = acceptance_of(asked, length), costs_of(asked, length, load)
    models = speedup_models(costs.c, costs.steps)
    gamma = asked.num_draft_tokens or predict_best(acceptance.survival, costs.steps, length, min_gamma=1).num_draft_tokens
    lengths = [_at(gamma, acceptance, costs) for gamma in range(length + 1)]
    opinions = [_opinion(model, acceptance, gamma, length) for model in models]
    here = lengths[gamma].curve
    alpha = alpha_of_tau(here.tau, gamma) or 0.0
    return EstimateResult(
        input=asked,
        num_rows=load.num_rows,
        context=load.context if knows_kv(asked) else None,
        alpha=acceptance.alpha,
        survival=acceptance.survival,
        c=costs.c,
        cost_source=costs.source,
        costs=costs.steps,
        is_timed=costs.is_timed,
        num_draft_tokens=gamma,
        equivalent_alpha=alpha,
        pays=here.speedup > 1,
        lengths=lengths,
        models=opinions,
        sensitivity=_sensitivity(models, gamma, [alpha, *(one.break_even_alpha for one in opinions)]),
        roof=roof_of(asked, load, gamma),
        memory=memory_overhead(asked, load),
        remote=remote_of(asked, acceptance.survival, costs, length),
        notes=notes_of(asked, costs, lengths),
    )


def speedup_models(c: float, costs: StepCosts) -> tuple[SpeedupModel, ...]:
    """Leviathan's and the envelope see c alone."""
    return (
        SpeedupModel(
            "leviathan",
            lambda alpha, survival, gamma: predicted_speedup(alpha, gamma, c),
            lambda gamma: break_even_alpha(gamma, c),
        ),
        SpeedupModel(
            "envelope",
            lambda alpha, survival, gamma: envelope_speedup(sum(survival[:gamma]), gamma, c),
            lambda gamma: alpha_of_tau(gamma * c + 2, gamma),  # kept tokens alone, tau - 1, must pay for gamma c + 1
        ),
        SpeedupModel(
            "curve",
            lambda alpha, survival, gamma: predict(survival, costs, gamma).speedup,
            lambda gamma: break_even(costs, gamma),
        ),
    )


def _at(gamma: int, acceptance: AssumedAcceptance, costs: Costs) -> LengthEstimate:
    kept = sum(acceptance.survival[:gamma])
    return LengthEstimate(
        num_draft_tokens=gamma,
        leviathan_tau=tau(acceptance.alpha, gamma),
        leviathan_speedup=predicted_speedup(acceptance.alpha, gamma, costs.c),
        effective_gamma=kept,
        envelope_speedup=envelope_speedup(kept, gamma, costs.c),
        curve=predict(acceptance.survival, costs.steps, gamma),
    )


def _opinion(model: SpeedupModel, acceptance: AssumedAcceptance, gamma: int, length: int) -> ModelEstimate:
    speedups = [model.speedup(acceptance.alpha, acceptance.survival, tried) for tried in range(length + 1)]
    best = max(range(length + 1), key=lambda tried: (speedups[tried], -tried))
    edges = {tried: alpha for tried in range(1, length + 1) if (alpha := model.break_even(tried)) is not None}
    lowest = min(edges, key=lambda tried: (edges[tried], tried), default=None)
    return ModelEstimate(
        name=model.name,
        best_num_draft_tokens=best,
        best_speedup=speedups[best],
        speedup=speedups[gamma],
        break_even_alpha=edges.get(gamma),
        lowest_break_even_alpha=None if lowest is None else edges[lowest],
        lowest_break_even_length=lowest,
    )


def _sensitivity(models: Sequence[SpeedupModel], gamma: int, marked: Sequence[float | None]) -> list[Sensitivity]:
    """Also at the `marked` alphas: the one there is and those that break even."""
    alphas = sorted({*ALPHAS, *(round(alpha, 6) for alpha in marked if alpha is not None)})
    speedups = [
        {model.name: model.speedup(alpha, survival_of([alpha], gamma), gamma) for model in models} for alpha in alphas
    ]
    return [Sensitivity(alpha=alpha, **found) for alpha, found in zip(alphas, speedups, strict=True)]


def memory_overhead(asked: EstimateInput, load: DecodeLoad) -> MemoryOverhead | None:
    """None where the draft's size is not known, or nothing."""
    if asked.draft is None or asked.draft.num_params == 0:
        return None
    draft_kv, target_kv = _kv_bytes(asked.draft, load), None
    target_weights = share = None
    if asked.target is not None:
        target_kv, target_weights = _kv_bytes(asked.target, load), round(asked.target.weights_bytes)
        both = (draft_kv, target_kv) if draft_kv is not None and target_kv is not None else (0, 0)
        share = (asked.draft.weights_bytes + both[0]) / (target_weights + both[1])
    return MemoryOverhead(
        draft_weights_bytes=round(asked.draft.weights_bytes),
        draft_kv_bytes=draft_kv,
        target_weights_bytes=target_weights,
        target_kv_bytes=target_kv,
        share=share,
    )


def roof_of(asked: EstimateInput, load: DecodeLoad, gamma: int) -> Roof | None:
    """None without the target's size and a bandwidth."""
    if asked.hardware is None or asked.target is None:
        return None
    return Roof(
        target_pass_s=pass_seconds(asked.target, 1, asked.hardware, load),
        draft_pass_s=pass_seconds(asked.draft, 1, asked.hardware, load) if asked.draft else None,
        free_tokens=free_tokens(asked.target, asked.hardware, load),
        free_rows=free_rows(asked.target, gamma + 1, asked.hardware, load),
    )


def _kv_bytes(model: ModelSize, load: DecodeLoad) -> int | None:
    return None if model.kv_bytes_per_token is None else model.kv_bytes(load.num_rows, load.context)


def notes_of(asked: EstimateInput, costs: Costs, lengths: Sequence[LengthEstimate]) -> list[str]:
    """What was assumed, and which measurements were stretched, a line each."""
    return [*_of_costs(asked, costs), *_of_measurements(costs, lengths), *_of_inputs(asked, lengths)]


def _of_costs(asked: EstimateInput, costs: Costs) -> Iterator[str]:
    if costs.source == "measured":
        return
    if costs.source == "roofline":
        yield (
            "times are the least that memory and arithmetic allow: real passes are slower, those of a small draft most of all, "
            "so the real c is larger"
        )
    if asked.hardware is None or asked.hardware.flops is None:
        yield (
            "a target pass is taken to cost the same however many tokens it checks, which ends where arithmetic takes longer "
            "than reading weights: measured times (--costs), or sizes with --bandwidth and --set flops, would tell"
        )
    if asked.c is None and asked.draft_token_s is None and asked.hardware is None:
        yield (
            "c is the ratio of the bytes that a pass of each model reads; a small draft's real passes cost more than their share"
        )


def _of_measurements(costs: Costs, lengths: Sequence[LengthEstimate]) -> Iterator[str]:
    if costs.source != "measured":
        return
    steps = costs.steps
    if outside := [one.num_draft_tokens for one in lengths if one.curve.cost_extrapolated]:
        measured = [point.num_tokens for point in steps.target.points]
        yield (
            f"passes were measured over {measured[0]} to {measured[-1]} tokens per row; γ = {_ranges(outside)} "
            "reach beyond them, along straight lines"
        )
    if steps.target.correction > NOISE:
        yield (
            "measured times fall with more tokens, which is taken for noise: points were moved by up to "
            f"{steps.target.correction:.0%}"
        )
    if steps.whole_steps:
        yield "the costs are of whole steps: c is what a step grows by per draft token, checking included, in plain steps"
    elif steps.overhead_s or steps.draft_fixed_s or steps.plain_overhead_s:
        yield (
            "only the curve counts the measured overhead and the fixed cost of drafting; the other two formulas have no place "
            "for them"
        )


def _of_inputs(asked: EstimateInput, lengths: Sequence[LengthEstimate]) -> Iterator[str]:
    longest = lengths[-1].num_draft_tokens
    given = len(asked.acceptance or [])
    if 1 < given < longest:
        yield f"positions {given + 1} to {longest} are taken to accept like position {given}, the last one given"
    unknown = [
        model.name
        for model in (asked.target, asked.draft)
        if model and model.num_params and model.kv_bytes_per_token is None
    ]
    if unknown:
        yield f"keys and values of {' and '.join(unknown)} are left out: a number of parameters does not tell them, a folder does"


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 8, 9, 10] -> '0, 8-10'."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
