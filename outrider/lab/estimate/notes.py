"""What a reader should know before believing an estimate: assumptions made, measurements stretched."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.lab.estimate.estimate_result import EstimateInput, LengthEstimate
from outrider.lab.estimate.inputs import Costs

NOISE = 0.02  # change of measured times that goes without saying


def notes_of(asked: EstimateInput, costs: Costs, lengths: Sequence[LengthEstimate]) -> list[str]:
    """One line each."""
    return [*_of_costs(asked, costs), *_of_measurements(costs, lengths), *_of_inputs(asked, lengths)]


def _of_costs(asked: EstimateInput, costs: Costs) -> list[str]:
    if costs.source == "measured":
        return []
    found = []
    if costs.source == "roofline":
        found.append(
            "times are the least that memory and arithmetic allow: real passes are slower, those of a small draft most of all, "
            "so the real c is larger"
        )
    if asked.hardware is None or asked.hardware.flops is None:
        found.append(
            "a target pass is taken to cost the same however many tokens it checks, which ends where arithmetic takes longer "
            "than reading weights: measured times (--costs), or sizes with --bandwidth and --set flops, would tell"
        )
    if asked.c is None and asked.draft_token_s is None and asked.hardware is None:
        found.append(
            "c is the ratio of the bytes that a pass of each model reads; a small draft's real passes cost more than their share"
        )
    return found


def _of_measurements(costs: Costs, lengths: Sequence[LengthEstimate]) -> list[str]:
    if costs.source != "measured":
        return []
    found, steps = [], costs.steps
    if outside := [one.num_draft_tokens for one in lengths if one.curve.cost_extrapolated]:
        measured = [point.num_tokens for point in steps.target.points]
        found.append(
            f"passes were measured over {measured[0]} to {measured[-1]} tokens per row; γ = {_ranges(outside)} "
            "reach beyond them, along straight lines"
        )
    if steps.target.correction > NOISE:
        found.append(
            "measured times fall with more tokens, which is taken for noise: points were moved by up to "
            f"{steps.target.correction:.0%}"
        )
    if steps.whole_steps:
        found.append(
            "the costs are of whole steps: c is what a step grows by per draft token, checking included, in plain steps"
        )
    elif steps.overhead_s or steps.draft_fixed_s or steps.plain_overhead_s:
        found.append(
            "only the curve counts the measured overhead and the fixed cost of drafting; the other two formulas have no place "
            "for them"
        )
    return found


def _of_inputs(asked: EstimateInput, lengths: Sequence[LengthEstimate]) -> list[str]:
    found = []
    longest = lengths[-1].num_draft_tokens
    given = len(asked.acceptance or [])
    if 1 < given < longest:
        found.append(
            f"positions {given + 1} to {longest} are taken to accept like position {given}, the last one given"
        )
    unknown = [
        model.name
        for model in (asked.target, asked.draft)
        if model and model.num_params and model.kv_bytes_per_token is None
    ]
    if unknown:
        found.append(
            f"keys and values of {' and '.join(unknown)} are left out: a number of parameters does not tell them, a folder does"
        )
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 8, 9, 10] -> '0, 8-10'."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
